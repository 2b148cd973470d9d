"""Searches a space with Optuna: every trial is a run, and any number of machines may take part.

Optuna's journal is a file of JSON lines with a lock, which processes and machines may share. A trial whose process was
killed stays marked as running (Optuna's heartbeats are for databases only); so every process has a lock while it lives,
and whoever goes on finds it free and marks the trial as failed.
"""

import itertools
import json
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from dendritic_lab.extras import MissingExtra, optional
from dendritic_lab.fleet.account import failure
from dendritic_lab.fleet.engine import ENDS, Engine, Event, Request
from dendritic_lab.fleet.identity import identity
from dendritic_lab.fleet.local import LocalEngine
from dendritic_lab.fleet.plan import PlannedRun
from dendritic_lab.fleet.recovery import left_behind, mark_failed
from dendritic_lab.fleet.sweep import Bounds, Space, Sweep
from dendritic_lab.fleet.trackers import track
from dendritic_lab.fleet.watch import read_progress
from dendritic_lab.lab.experiments import UsageError
from dendritic_lab.lab.metrics import read_metrics

MOST_FAILURES = 10  # failed trials in one process before it gives up


def import_optuna():
    "Optuna, quiet. Raises `UsageError` where it is not installed."
    try: optuna = optional("optuna", "sweep")
    except MissingExtra as e: raise UsageError(str(e)) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def open_study(sweep: Sweep, folder: Path):  # optuna.Study
    """The study of a sweep, which is made where it does not exist. Raises `UsageError` when it was made from another
    file or cannot be read."""
    optuna = import_optuna()
    import sqlalchemy.exc
    samplers = {"tpe": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
    sampler = samplers.get(sweep.sampler, optuna.samplers.RandomSampler)(seed=sweep.seed)
    pruner = optuna.pruners.NopPruner()
    if sweep.prune: pruner = optuna.pruners.MedianPruner(n_startup_trials=sweep.prune[1], n_warmup_steps=0)
    unreadable = (ValueError, ImportError, OSError, KeyError, optuna.exceptions.OptunaError,
                  sqlalchemy.exc.SQLAlchemyError)
    try:
        storage = _journal(optuna, folder / "journal.jsonl") if sweep.storage == "journal" else sweep.storage
        study = optuna.create_study(study_name=sweep.id, storage=storage, sampler=sampler, pruner=pruner,
                                    direction=sweep.direction, load_if_exists=True)
    except unreadable as e:
        raise UsageError(f"cannot open the storage of sweep {sweep.id}: {str(e).splitlines()[0]}") from None
    about = _about(sweep)
    if study.user_attrs.get("about", about) != about:
        raise UsageError(f"sweep {sweep.id} was started with another experiment, metric or search; "
                         f"rename {sweep.file.name} for a new one")
    study.set_user_attr("about", about)
    return study


def _journal(optuna, path: Path):
    backend = optuna.storages.journal
    lock = backend.JournalFileOpenLock(str(path))
    return optuna.storages.JournalStorage(backend.JournalFileBackend(str(path), lock_obj=lock))


def _about(sweep: Sweep) -> dict:
    "What must be the same when a sweep goes on, as JSON gives it back."
    search = {name: vars(s) if isinstance(s, Bounds) else s for name, s in sweep.search.items()}
    about = {"experiment": sweep.experiment.name, "profile": sweep.profile, "metric": sweep.metric,
             "parameters": sweep.parameters, "search": search}
    return json.loads(json.dumps(about))


def grid_of(search: Space) -> list[dict]:
    "Every combination of values."
    values = [range(s.low, s.high + 1) if isinstance(s, Bounds) else s for s in search.values()]
    return [dict(zip(search, point)) for point in itertools.product(*values)]


def enqueue_missing(study, search: Space):
    "Ask a study for every point of the grid of which no trial is done, under way or waiting: failed ones come again."
    failed = import_optuna().trial.TrialState.FAIL
    trials = [t for t in study.get_trials(deepcopy=False) if t.state != failed]
    held = [t.system_attrs.get("fixed_params", t.params) for t in trials]
    for point in grid_of(search):
        if point not in held: study.enqueue_trial(point)


def suggest(trial, search: Space) -> dict:
    "Values of a trial for every parameter of the search."
    def one(name, s):
        if isinstance(s, list): return trial.suggest_categorical(name, s)
        return (trial.suggest_int if s.integer else trial.suggest_float)(name, s.low, s.high, log=s.log)
    return {name: one(name, s) for name, s in search.items()}


@dataclass
class Trial:
    "A trial of this process that is under way."
    optuna: object  # optuna.Trial
    run: PlannedRun
    folder: Path | None = None
    reported: int = 0  # intermediate values that Optuna knows


class Search:
    "Runs trials of a study with an engine until there are as many as the file asks for."

    def __init__(self,
        sweep: Sweep,
        study,  # of `open_study`
        engine: Engine,
        out: Path,  # folder of the runs
        process: str,  # name of this one
        say: Callable[[str], None],  # is told what happens to trials, a line each
        tracker=None,  # of `find_tracker`
    ):
        self.sweep, self.study, self.engine, self.out, self.process = sweep, study, engine, out, process
        self.say, self.tracker, self.state = say, tracker, import_optuna().trial.TrialState
        self.open: dict[str, Trial] = {}
        self.next: Trial | None = None  # asked for, but the engine had no room
        self.failures = 0

    @property
    def gave_up(self) -> bool: return self.failures >= MOST_FAILURES

    def wanted(self) -> bool:
        "Whether another trial is to be started; failed ones do not count. A grid may be exhausted before."
        if len(self.open) >= self.engine.workers or self.gave_up: return False
        count = lambda *states: len(self.study.get_trials(deepcopy=False, states=states))
        if self.sweep.sampler == "grid" and not count(self.state.WAITING): return False
        return count(self.state.COMPLETE, self.state.PRUNED, self.state.RUNNING) < self.sweep.trials

    def go(self):
        "Until there are enough trials."
        while True:
            while self.next or self.wanted():
                self.next = self.next or self.ask()
                if not self.engine.submit(self.request(self.next), self.sweep.resources): break
                self.open[str(self.next.optuna.number)], self.next = self.next, None
            if not self.open: return
            for event in self.engine.events(0.5): self.take(event)
            for key in list(self.open): self.report(key)

    def ask(self) -> Trial:
        "The next trial that Optuna suggests."
        sweep, trial = self.sweep, self.study.ask()
        trial.set_user_attr("process", self.process)
        given = suggest(trial, sweep.search)
        self.say(f"trial {trial.number}: " + " ".join(f"{k}={v}" for k, v in given.items()))
        parameters = sweep.experiment.resolve(sweep.profile, {**sweep.parameters, **given})
        return Trial(trial, PlannedRun(sweep.experiment, sweep.profile, parameters, given, sweep.resources,
                                       identity(sweep.experiment, parameters)))

    def request(self, trial: Trial) -> Request:
        run = trial.run
        return {"key": str(trial.optuna.number), "notebook": str(run.experiment.notebook), "profile": run.profile,
                "parameters": run.parameters, "out": str(self.out), "identity": run.identity,
                "batch": f"sweep {self.sweep.id}", "attempt": 1}

    def take(self, event: Event):
        "Enter an event of the engine."
        key = event["key"]
        if event["event"] == "started": self.open[key].folder = Path(event["folder"])
        if event["event"] not in ENDS: return
        trial = self.open.pop(key)
        if event["event"] == "failed": return self.fail(trial, failure(event))
        folder, metric = Path(event["folder"]), self.sweep.metric
        values = {m["name"]: m["value"] for m in read_metrics(folder / "metrics.json")["metrics"]}
        if metric not in values: return self.fail(trial, f"it recorded no metric {metric!r}")
        trial.optuna.set_user_attr("run", folder.name)
        self.study.tell(trial.optuna, values[metric])
        self.say(f"trial {key}: {metric} {values[metric]:.6g}")
        if self.tracker: track(self.tracker, f"sweep-{self.sweep.id}", trial.run, folder)

    def fail(self, trial: Trial, reason: str):
        self.failures += 1
        self.study.tell(trial.optuna, state=self.state.FAIL)
        self.say(f"trial {trial.optuna.number} failed: {reason}")

    def report(self, key: str):
        "Report new intermediate values of a trial, and end it where the median of the others is better."
        trial = self.open[key]
        if not self.sweep.prune or trial.folder is None: return
        values = intermediate(trial.folder, self.sweep.prune[0])
        for step in range(trial.reported, len(values)):
            trial.optuna.report(values[step], step)
            if not trial.optuna.should_prune(): continue
            for _ in self.engine.stop(key, "pruned"): pass
            del self.open[key]
            self.study.tell(trial.optuna, state=self.state.PRUNED)
            return self.say(f"trial {key}: pruned after step {step + 1}")
        trial.reported = len(values)

    def interrupt(self):
        "Mark the trials of this process as failed, because it ends."
        for trial in [*self.open.values(), *([self.next] if self.next else [])]:
            self.study.tell(trial.optuna, state=self.state.FAIL)
        self.engine.close()


def intermediate(folder: Path, figure: str) -> list[float]:
    "The values of a figure in a run's progress, one for each epoch of each phase."
    found = {}
    for line in read_progress(folder):
        if "epoch" in line and isinstance(line.get(figure), (int, float)):
            found[line["task"], line["epoch"]] = line[figure]
    return list(found.values())


@contextmanager
def open_search(sweep: Sweep, workers: int, out: Path, say: Callable[[str], None], tracker=None) -> Iterator[Search]:
    """A search on this machine: what a crash left behind is marked as failed first, and nothing of this process is
    left at the end. Raises `UsageError` when the folder, the study or the machine cannot do it."""
    import_optuna()
    folder, process = Path(out) / "sweeps" / sweep.id, f"process-{secrets.token_hex(4)}"
    try: folder.mkdir(parents=True, exist_ok=True)
    except OSError as e: raise UsageError(f"cannot write to {out}: {e.strerror}") from e
    study = open_study(sweep, folder)
    recover(study, folder, out, sweep.experiment.name, say)
    if sweep.sampler == "grid":
        with FileLock(folder / "lock"): enqueue_missing(study, sweep.search)
    with FileLock(folder / f"{process}.lock"), LocalEngine(workers, folder / f"{process}.log") as engine:
        if (why := engine.refusal(sweep.resources)): raise UsageError(f"{sweep.experiment.name}: {why}")
        yield Search(sweep, study, engine, out, process, say, tracker)
    _forget_process(folder, process)


def recover(study, folder: Path, out: Path, experiment: str, say: Callable[[str], None]):
    """Mark trials and runs as failed whose process has ended: its lock is free. On another machine without this folder
    that cannot be known, and its trials are left alone."""
    state, ended = import_optuna().trial.TrialState, set()
    for lock in folder.glob("process-*.lock"):
        try: FileLock(lock).acquire(timeout=0).lock.release()
        except Timeout: continue
        ended.add(lock.stem)
    for trial in study.get_trials(deepcopy=False, states=(state.RUNNING,)):
        if trial.user_attrs.get("process") not in ended: continue
        study.tell(trial.number, state=state.FAIL)
        say(f"trial {trial.number}: its process has ended")
    for process in ended: _forget_process(folder, process)
    for run in left_behind(out, experiment): mark_failed(run)


def _forget_process(folder: Path, process: str):
    "Remove what a process of a sweep needed, and its log if nothing is in it."
    (folder / f"{process}.lock").unlink(missing_ok=True)
    shutil.rmtree(folder / f"{process}-runtime", ignore_errors=True)
    if (log := folder / f"{process}.log").exists() and not log.stat().st_size: log.unlink()


def describe(sweep: Sweep, study) -> dict:
    "What the report is made of: the trials, and the share of the metric's variance that each parameter explains."
    optuna = import_optuna()
    rows = [{"trial": t.number, "state": t.state.name.lower(), "value": t.value, **t.params,
             "run": t.user_attrs.get("run", "")} for t in study.get_trials(deepcopy=False)]
    importance = {}
    if len({r["value"] for r in rows if r["state"] == "complete"}) > 2:
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
        importance = dict(optuna.importance.get_param_importances(study, evaluator=evaluator))
    return {"experiment": sweep.experiment.name, "profile": sweep.profile, "metric": sweep.metric,
            "direction": sweep.direction, "sampler": sweep.sampler, "parameters": list(sweep.search), "trials": rows,
            "importance": importance}


def best_trials(about: dict, most: int = 5) -> list[dict]:
    "The best complete trials of what `describe` gave."
    complete = [t for t in about["trials"] if t["state"] == "complete"]
    return sorted(complete, key=lambda t: t["value"], reverse=about["direction"] == "maximize")[:most]


def write_sweep_report(about: dict, sweep: str, out: Path) -> Path:
    "Write the report of a sweep from what `describe` gave, and return its folder."
    from dendritic_lab.lab.runs import write_report
    template = Path(__file__).parent / "reports" / "sweep.ipynb"
    files = {"sweep.json": json.dumps(about, indent=1)}
    return write_report(template, files, Path(out) / "sweeps" / sweep / "reports")
