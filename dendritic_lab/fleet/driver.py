"""Takes a plan to its end with an engine, and keeps account of it.

A batch has a folder of its own, `outputs/batches/<id>/`, with `plan.json`, a journal `events.jsonl` and the log of its
workers. Nothing depends on the journal: what is finished is read from the folders of the runs, so a batch can go on
after any crash.
"""

import json
import os
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from dendritic_lab.fleet.account import Account, Journal
from dendritic_lab.fleet.cluster import RayEngine
from dendritic_lab.fleet.engine import Engine, Event, Request
from dendritic_lab.fleet.local import LocalEngine
from dendritic_lab.fleet.plan import Plan
from dendritic_lab.fleet.recovery import FinishedRuns, left_behind, mark_failed
from dendritic_lab.lab.experiments import UsageError

Show = Callable[[Account, str, dict], None]  # is told what happens to an account: the event and its details


class Driver:
    """Takes a plan to its end with an engine. Runs are started in the order of the file. One that fails goes back to
    the end of the queue as often as `retry` allows; each failed attempt keeps its folder."""

    def __init__(self, plan: Plan, engine: Engine, out: Path, retry: int, journal: Journal, show: Show):
        self.plan, self.engine, self.out, self.retry = plan, engine, out, retry
        self.journal, self.show = journal, show
        self.accounts = {run.identity: Account(run) for run in plan.runs}
        self.queue = deque()

    def prepare(self):
        "Mark what a crash left behind, and take account of what is finished."
        for name in {run.experiment.name for run in self.plan.runs}:
            for folder in left_behind(self.out, name): self.journal.note("left behind", folder=mark_failed(folder).name)
        finished = FinishedRuns(self.out)
        for account in self.accounts.values():
            run = account.run
            damaged = lambda folder, why, a=account: self.tell(a, "damaged", folder=str(folder), reason=why)
            account.folder = finished.find(run.experiment.name, run.identity, run.parameters, damaged)
            if account.folder: account.status = "reused"; self.tell(account, "reused", folder=str(account.folder))
            else: self.queue.append(account)

    def go(self, tick: Callable[[], None] = lambda: None):  # called at least twice a second
        "Until every run is done or has failed for good."
        while self.queue or self.running:
            while self.queue and self.engine.submit(self.request(self.queue[0]), self.queue[0].run.resources):
                self.queue.popleft().start()
            for event in self.engine.events(0.5): self.take(event)
            tick()

    def request(self, account: Account) -> Request:
        run = account.run
        return {"key": run.identity, "notebook": str(run.experiment.notebook), "profile": run.profile,
                "parameters": run.parameters, "out": str(self.out), "identity": run.identity, "batch": self.plan.id,
                "attempt": len(account.failures) + 1}

    def take(self, event: Event):
        "Enter an event of the engine."
        account, kind = self.accounts[event.pop("key")], event.pop("event")
        if kind == "cell": account.cell = event["number"], event["total"]
        if kind == "started": account.folder = Path(event["folder"])
        if kind in ("done", "reused"): account.finish(kind, Path(event["folder"]))
        if kind == "failed":
            account.fail(event)
            if len(account.failures) <= self.retry:
                account.status, event = "queued", event | {"again": True}
                self.queue.append(account)
        self.tell(account, kind, **event)

    def tell(self, account: Account, event: str, **rest):
        if event not in ("cell", "waiting"): self.journal.note(event, identity=account.run.identity, **rest)
        self.show(account, event, rest)

    def interrupt(self):
        "End the engine, and mark what was running as failed."
        self.engine.close()
        for account in self.running: account.fail({"reason": "interrupted", "cell": None, "folder": None})
        self.journal.note("interrupted")

    @property
    def running(self) -> list[Account]: return [a for a in self.accounts.values() if a.status == "running"]

    @property
    def failed(self) -> list[Account]: return [a for a in self.accounts.values() if a.status == "failed"]

    def counts(self) -> Counter: return Counter(a.status for a in self.accounts.values())

    def time_left(self) -> float | None:  # seconds; None: nothing is done yet
        spent = [a.seconds for a in self.accounts.values() if a.status == "done"]
        if not spent: return None
        mean, now = sum(spent) / len(spent), time.monotonic()
        under_way = sum(max(0.0, mean - (now - a.started)) for a in self.running)
        return (mean * len(self.queue) + under_way) / self.engine.workers


def open_batch(plan: Plan, out: Path, resume: bool) -> tuple[Path, FileLock]:
    """The folder of a batch, for this process alone. Raises `UsageError` when another has it, or when `resume` is not
    what it needs."""
    folder = Path(out) / "batches" / plan.id
    lock = FileLock(folder / "lock")
    try:
        known = (folder / "plan.json").exists()
        if resume and not known:
            raise UsageError(f"there is nothing to resume: {plan.file.name} with this code and these data was not "
                             f"started (it would be batch {plan.id}); leave --resume out")
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout: raise UsageError(f"batch {plan.id} is being run by another process") from None
    except OSError as e: raise UsageError(f"cannot write to {out}: {e.strerror}") from e
    try:
        if known and not resume and not all(finished_runs(plan, out)):
            raise UsageError(f"batch {plan.id} was started before and is not complete: --resume runs what is missing")
        write_plan(plan, folder)
    except UsageError:
        lock.release()
        raise
    return folder, lock


def finished_runs(plan: Plan, out: Path) -> list[Path | None]:  # as the plan has them
    "The folder of each run of a plan that is finished already."
    finished = FinishedRuns(out)
    return [finished.find(run.experiment.name, run.identity, run.parameters) for run in plan.runs]


def write_plan(plan: Plan, folder: Path):
    "Write plan.json in one step, and a copy of the batch file. Raises `UsageError` when the disk refuses."
    runs = [{"identity": run.identity, "experiment": run.experiment.name, "profile": run.profile,
             "parameters": run.parameters, "given": run.given} for run in plan.runs]
    try:
        new = folder / "plan.json.new"
        new.write_text(json.dumps({"id": plan.id, "runs": runs}, indent=1), encoding="utf-8")
        new.rename(folder / "plan.json")
        shutil.copyfile(plan.file, folder / "batch.yaml")
    except OSError as e: raise UsageError(f"cannot write to {folder}: {e.strerror}") from e


def batch_runs(out: Path, batch: str) -> list[Path]:
    "Folders of the finished runs of a batch, in its order. Raises `UsageError` for an unknown or damaged one."
    known = sorted(p.parent.name for p in (Path(out) / "batches").glob("*/plan.json"))
    if batch not in known: raise UsageError(f"there is no batch {batch!r}; known: {', '.join(known) or 'none'}")
    finished = FinishedRuns(out)
    try:
        runs = json.loads((Path(out) / "batches" / batch / "plan.json").read_text(encoding="utf-8"))["runs"]
        found = [finished.find(r["experiment"], r["identity"], r["parameters"]) for r in runs]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UsageError(f"plan.json of batch {batch} is damaged: {e}") from None
    return [folder for folder in found if folder]


def start_engine(kind: str, workers: int | None, address: str | None, folder: Path, plan: Plan, root: Path) -> Engine:
    """The engine `local` or `ray` for a plan. Raises `UsageError` when it can never give a run what it asks for; then
    nothing is left of a batch that was not started before."""
    try:
        if kind == "ray":
            token = os.urandom(16).hex()
            (folder / "token").write_text(token)
            engine = RayEngine(address, token, folder / "token", root, workers)
        else: engine = LocalEngine(workers, folder / "workers.log")
        for run in plan.runs:
            if (why := engine.refusal(run.resources)):
                engine.close()
                raise UsageError(f"{run}: {why}")
    except UsageError:
        if not (folder / "events.jsonl").exists(): shutil.rmtree(folder)
        raise
    return engine
