"""Runs in processes of this machine.

A worker process stays for the next run, for its imports take seconds; every run has a kernel, a process of its own,
all the same. A run that needs other devices or another number of threads gets another worker.
"""

import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from dendritic_lab.fleet.engine import ENDS, Event, Request, Resources
from dendritic_lab.fleet.recovery import mark_failed

WORKER = (sys.executable, "-m", "dendritic_lab.fleet.worker")


def find_gpus() -> list[str]:
    "Names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES has them."
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None: return [d for d in chosen.split(",") if d.strip()]
    import pynvml
    try:
        pynvml.nvmlInit()
        return [str(i) for i in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError: return []


class Devices:
    "Which GPU is taken, and by how much."

    def __init__(self, names: list[str]):
        self.free, self.runs = dict.fromkeys(names, 1.0), dict.fromkeys(names, 0)

    def take(self, wanted: float | None) -> dict[str, float] | None:  # name -> share; None: not now
        "Shares of GPUs. Without a wish, the one with the fewest runs, where there are any."
        if wanted == 0 or not self.free: taken = {}
        elif wanted is None: taken = {min(self.free, key=self.runs.get): 0.0}
        else:
            enough = sorted((free, name) for name, free in self.free.items() if free >= min(wanted, 1) - 1e-9)
            if len(enough) < wanted: return None
            taken = {name: min(wanted, 1.0) for _, name in enough[:max(1, int(wanted))]}
        for name, share in taken.items(): self.free[name] -= share; self.runs[name] += 1
        return taken

    def give_back(self, taken: dict[str, float]):
        for name, share in taken.items(): self.free[name] += share; self.runs[name] -= 1


class Worker:
    "A process and the request that it is busy with."

    def __init__(self, command: tuple[str, ...], variables: dict[str, str], log):
        self.variables, self.request, self.folder, self.resources = variables, None, None, None
        self.taken, self.unread = {}, b""
        self.process = subprocess.Popen(command, env=os.environ | variables, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=log, start_new_session=True)
        os.set_blocking(self.process.stdout.fileno(), False)

    def send(self, request: Request, resources: Resources, taken: dict[str, float]):
        self.request, self.resources, self.taken, self.folder = request, resources, taken, None
        try: self.process.stdin.write(json.dumps(request).encode() + b"\n"); self.process.stdin.flush()
        except BrokenPipeError: pass  # it died; its output ends, which says so

    def events(self) -> Iterator[Event | None]:  # None: it ended
        while (chunk := self.process.stdout.read(65536)):
            *lines, self.unread = (self.unread + chunk).split(b"\n")
            yield from map(json.loads, lines)
        if chunk == b"": yield None

    def end(self, patience: float = 10):
        "Ask it to stop, then insist."
        for send in (self.process.terminate, self.process.kill):
            if self.process.poll() is None: send()
            with suppress(subprocess.TimeoutExpired): self.process.wait(patience)
        self.process.stdin.close(); self.process.stdout.close()


class LocalEngine:
    "A pool of worker processes on this machine; an `Engine`. `close` it, or use it in a `with` statement."

    def __init__(self,
        workers: int | None,  # runs at a time; None: one a GPU, or one for two cores
        log: Path,  # what workers print
        command: tuple[str, ...] = WORKER,  # any that speaks the same lines
        gpus: list[str] | None = None,  # None: those that this process may use
    ):
        self.cores, self.gpus = len(os.sched_getaffinity(0)), find_gpus() if gpus is None else gpus
        self.workers = workers or max(1, len(self.gpus) or self.cores // 2)
        self.command, self.log = command, open(log, "ab")  # noqa: SIM115
        self.devices, self.pool, self.selector = Devices(self.gpus), [], selectors.DefaultSelector()
        # Where Jupyter keeps what it needs to reach a kernel; a killed worker does not remove its own.
        self.runtime = log.with_name(f"{log.stem}-runtime")
        shutil.rmtree(self.runtime, ignore_errors=True)

    def refusal(self, wanted: Resources) -> str | None:
        if (wanted.cpus or 1) > self.cores: return f"{wanted.cpus} cpus are asked for; this machine has {self.cores}"
        if (wanted.gpus or 0) > len(self.gpus):
            return f"{wanted.gpus:g} gpus are asked for; this machine has {len(self.gpus)}"
        return None

    def submit(self, request: Request, wanted: Resources) -> bool:
        busy = [w for w in self.pool if w.request]
        if len(busy) >= self.workers: return False
        cpus = sum(w.resources.cpus or 1 for w in busy) + (wanted.cpus or 1)
        if busy and cpus > max(self.cores, self.workers): return False
        taken = self.devices.take(wanted.gpus)
        if taken is None: return False
        threads = wanted.cpus or max(1, self.cores // self.workers)
        self._worker({"OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ",".join(taken),
                      "JUPYTER_RUNTIME_DIR": str(self.runtime)}).send(request, wanted, taken)
        return True

    def _worker(self, variables: dict[str, str]) -> Worker:
        "An idle worker with these variables, or a new one in the place of an idle one without."
        idle = [w for w in self.pool if not w.request]
        for worker in idle:
            if worker.variables == variables: return worker
        for worker in idle[:max(0, len(self.pool) + 1 - self.workers)]: self._drop(worker)
        worker = Worker(self.command, variables, self.log)
        self.pool.append(worker)
        self.selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
        return worker

    def events(self, timeout: float) -> Iterator[Event]:
        for ready, _ in self.selector.select(timeout):
            worker = ready.data
            for event in worker.events():
                if event is None: yield from self._ended(worker)
                elif worker.request and event["key"] == worker.request["key"]:
                    if event["event"] == "started": worker.folder = Path(event["folder"])
                    if event["event"] in ENDS: self._free(worker)
                    yield event

    def stop(self, key: str, reason: str) -> Iterator[Event]:
        for worker in [w for w in self.pool if w.request and w.request["key"] == key]:
            yield from self._ended(worker, reason)

    def _ended(self, worker: Worker, reason: str = "") -> Iterator[Event]:
        "A worker that ended by itself, or had to, failed its request, if it had one."
        request, folder = worker.request, worker.folder
        self._drop(worker)
        if request is None: return
        code = worker.process.returncode
        by_itself = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        folder, reason = str(mark_failed(folder)) if folder else None, reason or f"its worker {by_itself}"
        yield {"key": request["key"], "event": "failed", "cell": None, "folder": folder, "reason": reason}

    def _free(self, worker: Worker):
        self.devices.give_back(worker.taken)
        worker.request = None

    def _drop(self, worker: Worker):
        self.selector.unregister(worker.process.stdout)
        self.pool.remove(worker)
        worker.end()
        if worker.request: self._free(worker)

    def close(self):
        for worker in self.pool:
            if worker.process.poll() is None: worker.process.terminate()  # all at once, then one after the other
        for worker in list(self.pool):
            folder = worker.folder if worker.request else None
            self._drop(worker)
            if folder: mark_failed(folder)
        self.log.close()
        shutil.rmtree(self.runtime, ignore_errors=True)

    def __enter__(self): return self
    def __exit__(self, *error): self.close()
