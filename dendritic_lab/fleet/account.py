"""What became of each planned run, and the journal of a batch."""

import json
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path

from dendritic_lab.fleet.engine import Event
from dendritic_lab.fleet.plan import PlannedRun

STATUSES = ("queued", "running", "done", "reused", "failed")


@dataclass
class Account:
    "What became of one planned run."
    run: PlannedRun
    status: str = "queued"  # one of `STATUSES`
    folder: Path | None = None
    failures: list[dict] = field(default_factory=list)  # reason, folder and cell of each attempt that failed
    started: float = 0.0  # time.monotonic(), a clock that cannot be set
    seconds: float = 0.0  # of the attempt that was completed
    cell: tuple[int, int] = (0, 1)  # the one that is executed, and how many the notebook has

    def start(self):
        self.status, self.started, self.cell = "running", time.monotonic(), (0, 1)

    def finish(self, status: str, folder: Path):  # done or reused
        self.status, self.folder, self.seconds = status, folder, time.monotonic() - self.started

    def fail(self, event: dict):  # reason, folder, cell
        self.status, self.folder = "failed", event["folder"] and Path(event["folder"])
        self.failures.append(event)


def failure(event: Event | dict) -> str:
    "Why an attempt failed, in one line."
    return (f"cell {event['cell']}: " if event["cell"] else "") + " ".join(str(event["reason"]).split())


class Journal:
    "A line of JSON for each event. A disk that is full or gone costs the journal, not the batch."

    def __init__(self, path: Path): self.path, self.lost = path, False

    def note(self, event: str, **rest):
        line = json.dumps({"time": time.time(), "event": event, **rest})
        try:
            with open(self.path, "a", encoding="utf-8") as f: f.write(line + "\n")
        except OSError as e:
            why = f"cannot write {self.path.name}: {e.strerror}; the batch goes on without it"
            if not self.lost: logging.getLogger("dendritic_lab").warning("dendritic-lab: %s", why)
            self.lost = True
