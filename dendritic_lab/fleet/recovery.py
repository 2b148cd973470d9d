"""What is finished, what is being worked on, and what a crash left behind.

A run that belongs to a batch has `identity.json` in its folder. It counts as finished when its folder has its final
name and everything in it can be read; a damaged one is made again.

Two batches on one folder may want the same run. A lock on one byte of a shared file, chosen by the identity, keeps
them apart. The kernel of the operating system takes it away from a process that dies, however that happens, and no
file is left over.
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import yaml

from dendritic_lab.lab.metrics import MetricsError, read_metrics


def damage(folder: Path, parameters: dict) -> str | None:
    "What is wrong with a run's folder that says it is complete; None: nothing."
    try:
        if (folder / "status").read_text().strip() != "complete": return "its status is not complete"
        recorded = yaml.safe_load((folder / "params.yaml").read_text(encoding="utf-8"))
        if not isinstance(recorded, dict) or recorded.get("parameters") != parameters:
            return "params.yaml does not hold its parameters"
        read_metrics(folder / "metrics.json")
        json.loads((folder / "environment.json").read_text(encoding="utf-8"))
        if not (folder / "report.html").stat().st_size: return "report.html is empty"
    except (OSError, MetricsError, yaml.YAMLError, ValueError) as e: return " ".join(str(e).split())
    return None


def marked_runs(out: Path, experiment: str) -> Iterator[tuple[Path, dict]]:  # folder, content of identity.json
    "Runs of an experiment that belong to a batch, whatever became of them."
    for path in sorted((Path(out) / experiment).glob("*/identity.json")):
        with suppress(OSError, ValueError):
            mark = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(mark, dict) and "identity" in mark: yield path.parent, mark


class FinishedRuns:
    "The complete runs below a folder of runs, by identity; each experiment's are listed when first asked for."

    def __init__(self, out: Path): self.out, self.index = Path(out), {}

    def find(self,
        experiment: str,
        identity: str,
        parameters: dict,
        on_damage: Callable[[Path, str], None] = lambda folder, why: None,  # called for each that cannot be used
    ) -> Path | None:
        "The newest finished run of this identity."
        if experiment not in self.index: self.index[experiment] = self._list(experiment)
        for folder in self.index[experiment].get(identity, ()):
            wrong = damage(folder, parameters)
            if wrong is None: return folder
            on_damage(folder, wrong)
        return None

    def _list(self, experiment: str) -> dict[str, list[Path]]:  # newest first
        found = {}
        for folder, mark in reversed(list(marked_runs(self.out, experiment))):
            if not folder.suffix: found.setdefault(mark["identity"], []).append(folder)
        return found


@contextmanager
def run_lock(
    out: Path,
    identity: str,
    wait: Callable[[], None] | None = None,  # called each time when another process has it; None: do not wait
) -> Iterator[bool]:
    """The lock of an identity, within a `with` statement. It gives False at once where another process has it and
    `wait` is None. Not for two threads of one process."""
    folder = Path(out) / "batches"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "ab") as file:
        while True:
            try: fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, int(identity[:15], 16))
            except OSError:
                if wait is None:
                    yield False
                    return
                wait()
            else: break
        yield True


def left_behind(out: Path, experiment: str) -> list[Path]:
    "Folders of runs that nothing works on: they look as if they were running, but the lock of their identity is free."
    found = []
    for folder, mark in marked_runs(out, experiment):
        if folder.suffix != ".running": continue
        with run_lock(out, mark["identity"]) as free:
            if free: found.append(folder)
    return found


def end_processes_of(folder: Path):
    """Kill the processes of this user on this machine that work in the folder of a run: kernels and whatever they
    started. The environment variable that names the folder gives them away."""
    import psutil
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            at_work = process.pid != os.getpid() and process.environ().get("DENDRITIC_LAB_RUN") == str(folder)
            if at_work: found.append(process)
    for process in found:
        with suppress(psutil.Error): process.kill()
    psutil.wait_procs(found, timeout=5)


def mark_failed(folder: Path) -> Path:  # its new name
    "Mark what a killed worker left behind: end its processes and rename the folder."
    from dendritic_lab.lab.runs import Run
    end_processes_of(folder)
    return Run(folder).fail() if folder.exists() else folder.with_suffix(".failed")
