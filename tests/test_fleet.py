"""Plans, engines, accounts and studies, one at a time and without notebooks; faults of all together: test_batch.py."""

import io
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from dendritic_lab.cli.show import LiveView, PlainView, duration, sparkline
from dendritic_lab.fleet.account import Journal
from dendritic_lab.fleet.cleaning import find_removable
from dendritic_lab.fleet.cluster import RayEngine
from dendritic_lab.fleet.driver import Driver
from dendritic_lab.fleet.engine import Resources
from dendritic_lab.fleet.identity import digest, identity
from dendritic_lab.fleet.local import Devices, LocalEngine
from dendritic_lab.fleet.plan import Plan, PlannedRun, read_plan
from dendritic_lab.fleet.study import best_trials, describe, enqueue_missing, import_optuna, open_study, suggest
from dendritic_lab.fleet.sweep import read_sweep
from dendritic_lab.fleet.watch import gpu_lines, last_progress, underway
from dendritic_lab.lab.experiments import Experiment

PARAMETERS = """seed: int = 0  # of what is random; 0..1000
rate: float = 0.1  # learning rate; 0..1
epochs: int = 1  # passes over the data; 1..9"""


@pytest.fixture
def tiny(make_checkout, monkeypatch) -> Path:
    "A checkout with an experiment of three parameters, which is the current folder."
    monkeypatch.chdir(made := make_checkout("seed", parameters=PARAMETERS, profiles="quick: {epochs: 2}\n"))
    return made


@pytest.fixture
def experiment(tiny) -> Experiment:
    return Experiment(tiny / "nbs/experiments/tiny.ipynb")


def test_a_plan_has_every_combination_once(tiny):
    many = "experiments: tiny\nprofiles: smoke\ngrid: {rate: [0.1, 0.3]}\nlist: [{epochs: 1}, {epochs: 3}]\nseeds: 2\n"
    (tiny / "many.yaml").write_text(many)
    plan = read_plan(tiny / "many.yaml")
    assert len(plan.runs) == len({str(run) for run in plan.runs}) == 8 and plan.repeated == 0
    assert str(plan.runs[0]) == "tiny smoke rate=0.1 epochs=1 seed=0"


def test_a_run_that_two_sections_name_is_planned_once(tiny):
    twice = "- {experiments: tiny, profiles: smoke}\n- {experiments: tiny, profiles: smoke, parameters: {rate: 0.1}}\n"
    (tiny / "many.yaml").write_text(twice)
    plan = read_plan(tiny / "many.yaml")
    assert (len(plan.runs), plan.repeated) == (1, 1)
    (tiny / "many.yaml").write_text("experiments: [tiny]\nprofiles: [smoke]\n")
    assert read_plan(tiny / "many.yaml").id == plan.id and plan.id.startswith("many-")


def test_an_identity_is_of_parameters_and_code(experiment):
    resolve = lambda **given: identity(experiment, experiment.resolve("smoke", given))
    assert resolve() == resolve(seed="0") != resolve(seed=1) and len(resolve()) == 64
    before = resolve()
    experiment.notebook.write_text(experiment.notebook.read_text().replace('"seed"', '"seed + 1"'))
    changed = Experiment(experiment.notebook)
    assert identity(changed, changed.resolve("smoke")) != before
    assert digest("a", "b") != digest("ab")


def test_gpus_are_shared_and_taken_in_turns():
    devices, even = Devices(["0", "1"]), Devices(["0", "1"])
    taken = [devices.take(share) for share in (0.5, 0.5, 1, 1)]
    assert taken == [{"0": 0.5}, {"0": 0.5}, {"1": 1.0}, None]
    devices.give_back(taken[2])
    assert devices.take(1) == {"1": 1.0}
    assert [list(even.take(None)) for _ in range(3)] == [["0"], ["1"], ["0"]]


STAND_IN = """
import json, os, sys
for line in sys.stdin:
    key = json.loads(line)["key"]
    if key == "3": os.kill(os.getpid(), 9)
    failed = {"event": "failed", "reason": "bad luck", "folder": None, "cell": 1}
    print(json.dumps({"key": key} | (failed if key == "2" else {"event": "done", "folder": "f"})), flush=True)
"""


def test_a_worker_that_dies_fails_its_request_and_is_replaced(tmp_path):
    happened = []
    with LocalEngine(1, tmp_path / "log", (sys.executable, "-c", STAND_IN), gpus=[]) as engine:
        for key in "1234":
            assert engine.submit({"key": key}, Resources())
            assert not engine.submit({"key": "no room"}, Resources())
            while len(happened) < int(key): happened += engine.events(5)
    assert [e["event"] for e in happened] == ["done", "failed", "failed", "done"]
    assert happened[1]["reason"] == "bad luck" and happened[2]["reason"] == "its worker was ended by SIGKILL"


class InstantEngine:
    "Completes every request at once, except those for seed 1."
    workers = 1

    def __init__(self): self.waiting = []
    def refusal(self, wanted): return None
    def submit(self, request, wanted): return not self.waiting and not self.waiting.append(request)
    def stop(self, key, reason): return iter(())
    def close(self): pass

    def events(self, timeout):
        request = self.waiting.pop()
        failed = {"event": "failed", "reason": "bad luck", "cell": 3, "folder": None}
        done = {"event": "done", "folder": "outputs/tiny/a"}
        yield {"key": request["key"]} | (failed if request["parameters"]["seed"] == 1 else done)


@pytest.fixture
def driver(tmp_path) -> Driver:
    "A driver that took three runs to their end; the second failed twice."
    experiment = Experiment(Path("tiny.ipynb"))
    runs = [PlannedRun(experiment, "smoke", {"seed": s}, {"seed": s}, Resources(), f"{s:064x}") for s in range(3)]
    plan, journal = Plan(Path("tiny.yaml"), tuple(runs), 0), Journal(tmp_path / "events.jsonl")
    driver = Driver(plan, InstantEngine(), tmp_path, 1, journal, PlainView(io.StringIO()))
    driver.prepare()
    driver.go()
    return driver


def test_a_run_that_fails_for_good_stops_no_other(driver):
    assert [a.status for a in driver.accounts.values()] == ["done", "failed", "done"]
    assert [len(a.failures) for a in driver.accounts.values()] == [0, 2, 0]
    assert driver.counts() == {"done": 2, "failed": 1} and driver.time_left() == 0
    said = driver.show.stream.getvalue()
    assert said.count("cell 3: bad luck") == 2 and said.count("(again later)") == 1


def test_the_live_view_shows_what_is_running(driver, tmp_path):
    last = list(driver.accounts.values())[-1]
    last.status, last.cell, last.started, last.folder = "running", (4, 9), time.monotonic() - 75, tmp_path
    line = {"time": 1.0, "task": "dense", "done": 3, "total": 5, "loss": 0.25}
    (tmp_path / "progress.jsonl").write_text(json.dumps(line) + '\n{"time": 2.0, "ta')
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(LiveView(console).draw(driver))
    shown = console.export_text()
    for words in ("running 1", "failed 1", "tiny smoke seed=2", "4/9", "dense 3/5", "loss 0.250", "1 min 15 s"):
        assert words in shown, shown


def test_a_journal_that_cannot_be_written_costs_nothing_else(tmp_path, caplog):
    journal = Journal(tmp_path / "gone" / "events.jsonl")
    for _ in range(2): journal.note("done")
    assert [r.getMessage() for r in caplog.records] == [
        "dendritic-lab: cannot write events.jsonl: No such file or directory; the batch goes on without it"]


def test_durations_and_sparklines():
    durations = [duration(s) for s in (None, -3, 7.2, 130, 3600 * 27 + 61)]
    assert durations == ["-", "0 s", "7 s", "2 min 10 s", "27 h 1 min"]
    assert [sparkline([2.0 ** -i for i in range(n)]) for n in (0, 1, 4)] == ["", "▁", "█▄▂▁"]
    assert len(sparkline(list(range(400)))) == 20


def test_progress_is_read_without_the_line_that_is_being_written(tmp_path):
    folder = tmp_path / "tiny/20260101-000000-abcdef.running"
    folder.mkdir(parents=True)
    assert last_progress(folder) is None and underway(folder).phase == ""
    lines = [{"time": 1000 + 2 * i, "task": "dense", "done": 10 * i, "total": 100, "epoch": 1 + i // 2,
              "loss": 1 / (1 + i), "best": 0.7} for i in range(5)]
    (folder / "progress.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"time": 1010, "ta')
    state = underway(folder, now=1011)
    assert (state.experiment, state.left, state.share, state.quiet, state.epoch) == ("tiny", 12, 0.4, 3, 3)
    assert last_progress(folder) == lines[-1] and isinstance(gpu_lines(), list)


def test_a_study_is_shared_and_says_what_was_best(tiny):
    search = "search: {epochs: {low: 1, high: 2}, rate: [0.0, 0.3]}"
    (tiny / "rates.yaml").write_text(f"experiment: tiny\nmetric: tiny.score\nsampler: grid\nprofile: smoke\n{search}\n")
    sweep = read_sweep(tiny / "rates.yaml")
    study = open_study(sweep, tiny)
    enqueue_missing(study, sweep.search)
    study.tell(study.ask(), state=import_optuna().trial.TrialState.FAIL)  # its point comes again
    enqueue_missing(study, sweep.search)
    for trial in (study.ask() for _ in range(4)):
        values = suggest(trial, sweep.search)
        study.tell(trial, values["epochs"] - values["rate"])
    about = describe(sweep, open_study(sweep, tiny))  # another process would read the same
    assert len(about["trials"]) == 5 and about["importance"].keys() == {"epochs", "rate"}
    best = best_trials(about)[0]
    assert (best["epochs"], best["rate"], best["value"]) == (2, 0.0, 2.0)


def test_failed_and_superseded_runs_can_be_removed_but_no_reference(tmp_path):
    for name in ("tiny/1.failed", "tiny/2", "tiny/3", "reference/tiny/1.failed", "sweeps/a"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "params.yaml").write_text("{experiment: tiny, profile: quick, parameters: {}}")
    assert [(f.name, why) for f, why in find_removable(tmp_path)] == [("2", "superseded by 3"), ("1.failed", "failed")]


class StandInRay:
    "As much of Ray as the engine uses; a task is executed at once, and fails like a lost machine for seed 1."
    class RayError(Exception): pass

    def __init__(self): self.exceptions, self.tasks, self.cancelled = SimpleNamespace(RayError=self.RayError), {}, []
    def init(self, **settings): self.settings = settings
    def cluster_resources(self): return {"CPU": 2.0}
    def remote(self, **settings): return lambda function: SimpleNamespace(options=lambda **wanted: self.task(function))

    def task(self, function):
        def start(*words):
            self.tasks[len(self.tasks)] = lambda: function(*words)
            return len(self.tasks) - 1
        return SimpleNamespace(remote=start)

    def wait(self, references, num_returns, timeout): return references[:num_returns], references[num_returns:]
    def cancel(self, reference, force): self.cancelled.append(reference)
    def shutdown(self): pass

    def get(self, reference):
        if reference == 1: raise self.RayError("the machine was lost\nand more")
        return self.tasks[reference]()


def test_the_ray_engine_gives_the_same_events(tiny, experiment, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", ray := StandInRay())
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    done = lambda request, report: {"key": request["key"], "event": "done", "folder": request["out"]}
    monkeypatch.setattr("dendritic_lab.fleet.cluster.work", done)
    (tiny / "token").write_text("secret")
    request = lambda key: {"key": key, "notebook": str(experiment.notebook), "out": str(tiny / "outputs"),
                           "identity": "a" * 64, "attempt": 1}
    with RayEngine(None, "secret", tiny / "token", tiny, most=3) as engine:
        assert ray.settings["address"] is None and engine.workers == 3
        assert "3 cpus are asked for" in engine.refusal(Resources(cpus=3)) and not engine.refusal(Resources(cpus=2))
        assert [engine.submit(request(key), Resources()) for key in "abcd"] == [True, True, True, False]
        events = [*engine.events(1), *engine.events(1), *engine.stop("c", "pruned"), *engine.events(1)]
    assert [(e["key"], e["event"]) for e in events] == [("a", "done"), ("b", "failed"), ("c", "failed")]
    assert [e["reason"] for e in events[1:]] == ["Ray: the machine was lost", "pruned"] and ray.cancelled == [2]
