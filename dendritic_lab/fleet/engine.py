"""What executes runs: it takes requests and gives back events, and decides nothing else."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NotRequired, Protocol, TypedDict


@dataclass(frozen=True)
class Resources:
    "What one run takes."
    cpus: int | None = None  # threads of computation; None: an equal part of this machine's, on a cluster 1
    gpus: float | None = None  # a share of one, or a whole number; None: one of its own, where the machine has any


class Request(TypedDict):
    "One run that an engine is asked to execute; plain values only, so that it travels as JSON."
    key: str  # names the request in its events
    notebook: str  # path of the experiment
    profile: str
    parameters: dict  # effective
    out: str  # folder of all runs
    identity: str  # these three are written into the folder of the run
    batch: str
    attempt: int  # from 1


class Event(TypedDict):
    """What happened to a request: `started` (with `folder`), `cell` (`number`, `total`) and `waiting`; at the end
    exactly one of `done` and `reused` (`folder`), or `failed` (`reason`, `folder`, `cell`)."""
    key: str
    event: str
    folder: NotRequired[str | None]
    number: NotRequired[int]
    total: NotRequired[int]
    reason: NotRequired[str]
    cell: NotRequired[int | None]


ENDS = ("done", "reused", "failed")  # the last event of every request is one of these


class Engine(Protocol):
    "Where the runs of a batch are executed."

    @property
    def workers(self) -> int:
        "How many runs it executes at a time, from 1; estimates of the time left divide by it."

    def refusal(self, wanted: Resources) -> str | None:
        "Why these resources can never be given; None when they can."

    def submit(self, request: Request, wanted: Resources) -> bool:
        "Start a request, and say True; False when nothing is free now: offer it again after the next events."

    def events(self, timeout: float) -> Iterator[Event]:
        "What happened since the last call, waiting for at most `timeout` seconds. Every submitted request ends once."

    def stop(self, key: str, reason: str) -> Iterator[Event]:
        "End the request `key` before its time: its processes end, its folder is marked as failed, and it says so."

    def close(self):
        "End what is still running, as `stop` does, and give everything back. Nothing may be submitted afterwards."
