"""What is running now, on this machine or in a shared folder.

`fit` writes a line to the progress file of its run twice a second at most: the phase, how far it is, the epoch, the
loss and the best score so far. That is all that is read here, so it works on a folder that other machines write to.
"""

import json
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

NOT_EXPERIMENTS = ("batches", "comparisons", "reference", "sweeps")  # folders of outputs/ that hold no runs
TAIL = 1_000_000  # bytes of a progress file that are read, from its end
ABOUT = {"time", "task", "done", "total"}  # what every line has; the rest are figures


def read_progress(folder: Path | None, tail: int = TAIL) -> list[dict]:
    "The lines of a run's progress file, from its last `tail` bytes; one that is just being written is left out."
    if folder is None: return []
    path, found = folder / "progress.jsonl", []
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - tail))
            lines = file.read().splitlines()
    except OSError: return []
    for line in lines:
        with suppress(ValueError):
            read = json.loads(line)
            if isinstance(read, dict) and read.keys() >= ABOUT: found.append(read)
    return found


def last_progress(folder: Path | None) -> dict | None:
    "The last line of a run's progress file."
    lines = read_progress(folder, 10_000)
    return lines[-1] if lines else None


def figures_of(line: dict) -> dict[str, float]:
    "The figures that a line of progress carries."
    return {k: v for k, v in line.items() if k not in ABOUT and isinstance(v, (int, float))}


@dataclass(frozen=True)
class Underway:
    "The state of one run."
    experiment: str
    name: str
    phase: str = ""
    share: float | None = None  # of the phase that is done, 0 to 1
    epoch: int | None = None
    loss: float | None = None
    best: float | None = None  # validation score so far
    losses: tuple[float, ...] = ()  # of the phase
    left: float | None = None  # seconds until the phase ends
    quiet: float = 0.0  # seconds since it last said something


def underway(folder: Path, now: float | None = None) -> Underway:  # now: seconds, as time.time() gives them
    "The state of the run in a `.running` folder. Times that clocks contradict count as none."
    lines, now = read_progress(folder), time.time() if now is None else now
    if not lines: return Underway(folder.parent.name, folder.stem)
    last = lines[-1]
    phase = [line for line in lines if line["task"] == last["task"]]
    seconds, steps = last["time"] - phase[0]["time"], last["done"] - phase[0]["done"]
    return Underway(
        folder.parent.name, folder.stem, last["task"],
        share=last["done"] / last["total"] if last["total"] else None,
        epoch=last.get("epoch"), loss=last.get("loss"), best=last.get("best"),
        losses=tuple(line["loss"] for line in phase if "loss" in line),
        left=(last["total"] - last["done"]) * seconds / steps if seconds > 0 and steps > 0 else None,
        quiet=max(0.0, now - last["time"]))


def running(out: Path) -> list[Underway]:
    "All runs that are under way in a folder of runs, oldest first."
    folders = sorted(Path(out).glob("*/*.running"), key=lambda p: p.name)
    return [underway(folder) for folder in folders if folder.parent.name not in NOT_EXPERIMENTS]


def gpu_lines() -> list[str]:
    "Use and memory of each GPU of this machine."
    import pynvml
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        pairs = [(pynvml.nvmlDeviceGetUtilizationRates(h).gpu, pynvml.nvmlDeviceGetMemoryInfo(h)) for h in handles]
    except pynvml.NVMLError: return []
    gib = lambda size: f"{size / 2**30:.1f}"
    return [f"GPU {i}: {use} % busy, {gib(memory.used)} of {gib(memory.total)} GiB"
            for i, (use, memory) in enumerate(pairs)]
