"""One run, on whatever machine; and a process that works on one request after another.

A worker process reads requests from its input, a line of JSON each, and writes events. When its input ends, whoever
started it has ended, and it ends too; a run that it is busy with is interrupted as by Ctrl-C, so its kernel ends and
its folder is marked as failed.
"""

import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from dendritic_lab.fleet.engine import Event, Request
from dendritic_lab.fleet.identity import digest_folder, identity
from dendritic_lab.fleet.recovery import FinishedRuns, run_lock
from dendritic_lab.lab.experiments import Experiment, UsageError


def work(request: Request, report: Callable[[Event], None]) -> Event:  # the last event
    """Execute a request; `report` gets its events but the last. With the lock it looks again for a finished run, and
    whether code and data are still those that were planned."""
    from dendritic_lab.lab.runs import Run, RunFailed, run_experiment
    out, of, parameters = Path(request["out"]), request["identity"], request["parameters"]
    event = lambda kind, **rest: {"key": request["key"], "event": kind, **rest}

    def on_start(run: Run):
        mark = {k: request[k] for k in ("identity", "batch", "attempt")}
        (run.folder / "identity.json").write_text(json.dumps(mark), encoding="utf-8")
        report(event("started", folder=str(run.folder)))

    def wait():
        report(event("waiting"))
        time.sleep(1)

    try:
        experiment = Experiment(Path(request["notebook"]))
        with run_lock(out, of, wait):
            folder = FinishedRuns(out).find(experiment.name, of, parameters)
            if folder: return event("reused", folder=str(folder))
            digest_folder.cache_clear()
            if identity(experiment, parameters) != of:
                return event("failed", reason="code or data changed after the run was planned", folder=None, cell=None)
            on_cell = lambda number, total: report(event("cell", number=number, total=total))
            folder = run_experiment(experiment, request["profile"], parameters, out, on_cell, on_start)
        return event("done", folder=str(folder))
    except RunFailed as e: return event("failed", reason=str(e), folder=str(e.folder), cell=e.cell)
    except (UsageError, OSError) as e: return event("failed", reason=str(e), folder=None, cell=None)


def serve():
    "Work on requests from standard input until it ends."
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what else is printed goes to the log
    requests, busy = queue.SimpleQueue(), threading.Event()

    def read():
        for line in sys.stdin: requests.put(json.loads(line))
        requests.put(None)
        if busy.is_set(): os.kill(os.getpid(), signal.SIGTERM)
    threading.Thread(target=read, daemon=True).start()
    report = lambda event: events.write(json.dumps(event) + "\n")
    try:
        while (request := requests.get()) is not None:
            busy.set()
            report(work(request, report))
            busy.clear()
    except (KeyboardInterrupt, BrokenPipeError): os._exit(130)


if __name__ == "__main__": serve()
