"""Sweeps go on after a crash and end what is hopeless; runs are compared, verified, watched and cleaned away."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from conftest import COMMAND, record_by_hand
from dendritic_lab.cli import app
from dendritic_lab.fleet.engine import Resources
from dendritic_lab.fleet.plan import PlannedRun
from dendritic_lab.fleet.study import open_study
from dendritic_lab.fleet.sweep import read_sweep
from dendritic_lab.fleet.trackers import find_tracker, track
from dendritic_lab.lab.experiments import Experiment

RECORD = record_by_hand("tiny.score", "x * x")
REPORT = """import json, os, time
def say(epoch):
    line = {'time': time.time(), 'task': 'training', 'done': epoch, 'total': 2, 'epoch': epoch, 'score': x}
    with open(os.environ['DENDRITIC_LAB_PROGRESS'], 'a') as f: f.write(json.dumps(line) + chr(10))
say(1)
if x == 0: time.sleep(600)
say(2)"""
WAIT = """import pathlib, time
if x == 2 and not pathlib.Path('../../../go').exists(): pathlib.Path('here').touch(); time.sleep(600)"""
FILE = """experiment: tiny
profile: smoke
metric: tiny.score
sampler: grid
search: {x: [3.0, 2.0, 0.0]}
prune: {figure: score, after: 2}
"""


def states(checkout: Path) -> dict[float, str]:
    study = open_study(read_sweep(checkout / "rates.yaml", checkout), checkout / "outputs/sweeps/rates")
    return {t.params["x"]: t.state.name for t in study.get_trials() if t.params}


def at_work_in(checkout: Path) -> bool:
    "Whether a process of a run in the checkout is left."
    variables = [p.info["environ"] or {} for p in psutil.process_iter(["environ"])]
    return any(str(checkout) in v.get("DENDRITIC_LAB_RUN", "") for v in variables)


def test_a_sweep_is_killed_goes_on_and_ends_what_is_hopeless(make_checkout, lab):
    parameters = "x: float = 1.0  # a number; 0..9"
    made = make_checkout(WAIT, REPORT, RECORD, parameters=parameters, profiles="quick: {x: 2}\n")
    (made / "rates.yaml").write_text(FILE)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([*COMMAND, "sweep", "rates.yaml"], cwd=made, **quiet)
    end = time.monotonic() + 120
    while not list(made.glob("outputs/tiny/*/here")) and time.monotonic() < end: time.sleep(0.1)
    process.kill()
    process.wait()
    assert states(made) == {3.0: "COMPLETE", 2.0: "RUNNING"}
    (made / "go").touch()
    while at_work_in(made) and time.monotonic() < end: time.sleep(0.1)
    (made / "rates.yaml").write_text(FILE.replace("after: 2", "after: 1"))
    done = lab(made, "sweep", "rates.yaml", timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "its process has ended" in done.stdout and "pruned after step 1" in done.stdout and "9 " in done.stdout
    assert states(made) == {3.0: "COMPLETE", 2.0: "PRUNED", 0.0: "PRUNED"}  # 2 came again
    report, = made.glob("outputs/sweeps/rates/reports/*/report.html")
    assert report.read_text().count("data:image/png") == 1 and "Too few complete trials" in report.read_text()
    assert not list(made.glob("outputs/tiny/*.running")) and not list(made.glob("outputs/sweeps/rates/*.lock"))
    other = made / "rates.yaml"
    other.write_text(FILE.replace("[3.0, 2.0, 0.0]", "[1.0]"))
    refused = lab(made, "sweep", "rates.yaml")
    assert refused.returncode == 2 and "was started with another experiment, metric or search" in refused.stderr


@pytest.fixture
def finished(make_checkout, lab):
    "A checkout with two finished runs of `tiny` and what they were made of."
    parameters = "x: float = 1.0  # a number; 0..9\nseed: int = 0  # of what is random"
    made = make_checkout(RECORD, parameters=parameters, profiles="quick: {x: 2}\n")
    batch = "experiments: tiny\nprofiles: smoke\ngrid: {x: [1.0, 3.0]}\nparameters: {seed: 4}\n"
    (made / "many.yaml").write_text(batch)
    done = lab(made, "batch", "many.yaml", "--workers", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    return made, sorted(p for p in (made / "outputs/tiny").iterdir())


def test_runs_are_compared_verified_and_cleaned(finished, lab):
    made, runs = finished
    batch, = (p.parent.name for p in made.glob("outputs/batches/*/plan.json"))
    compared = lab(made, "compare", "--batch", batch, timeout=240)
    assert compared.returncode == 0 and re.search(r"x=3.0 +│ 8 ", compared.stdout), compared.stdout + compared.stderr
    report, = made.glob("outputs/comparisons/*/report.html")
    assert report.read_text().count("data:image/png") == 1 and "Traceback" not in report.read_text()
    assert str(made) not in report.with_suffix(".ipynb").read_text()

    verified = lab(made, "verify", str(runs[0].relative_to(made)))
    assert verified.returncode == 0 and "bit-equal" in verified.stdout, verified.stdout + verified.stderr
    metrics, environment = (json.loads((runs[0] / name).read_text()) for name in ("metrics.json", "environment.json"))
    metrics["metrics"][0] |= {"value": 1.0000001, "values": [1.0000001]}
    (runs[0] / "metrics.json").write_text(json.dumps(metrics))
    environment["git"] = {"commit": "a" * 40, "dirty": False}
    (runs[0] / "environment.json").write_text(json.dumps(environment))
    different = lab(made, "verify", str(runs[0].relative_to(made)))
    assert different.returncode == 1, different.stdout + different.stderr
    assert "differs, in the same environment" in different.stdout and "commit: aaaaaaaaaaaa then" in different.stdout

    # A failed one, and one that `runs[0]` supersedes.
    for name in ("19990101-000000-aaaaaa.failed", "19990101-000000-bbbbbb"):
        (made / "outputs/tiny" / name).mkdir()
        (made / "outputs/tiny" / name / "params.yaml").write_bytes((runs[0] / "params.yaml").read_bytes())
    reference = made / "outputs/reference/tiny/19990101-000000-cccccc.failed"
    reference.mkdir(parents=True)
    (reference / "params.yaml").write_bytes((runs[0] / "params.yaml").read_bytes())
    (made / "elsewhere").mkdir()
    (made / "outputs/link").symlink_to(made / "elsewhere")
    listed = lab(made, "clean")
    assert listed.returncode == 0 and "2 runs can be removed" in listed.stdout, listed.stdout
    assert f"superseded by {runs[0].name}" in listed.stdout and len(list((made / "outputs/tiny").iterdir())) == 4
    assert lab(made, "clean", "--yes").returncode == 0
    assert sorted((made / "outputs/tiny").iterdir()) == runs and reference.exists() and (made / "elsewhere").exists()


def test_watch_shows_what_fit_reports(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "tiny/20260101-000000-abcdef.running"
    assert CliRunner().invoke(app, ["watch", "--out", "."]).output == "nothing is running\n"
    folder.mkdir(parents=True)
    code = """
import torch
from torch import nn
from dendritic_lab.training import fit
model, rows = nn.Linear(2, 1), [{"x": torch.randn(2)} for _ in range(8)]
fit(model, torch.utils.data.DataLoader(rows, 4), loss=lambda m, b: m(b["x"]).square().mean(),
    evaluate=lambda m: {"accuracy": 0.25}, epochs=3, lr=0.01, description="dense", cpu=True)
"""
    variables = os.environ | {"DENDRITIC_LAB_PROGRESS": str(folder / "progress.jsonl")}
    subprocess.run([sys.executable, "-c", code], env=variables, check=True)
    shown = CliRunner().invoke(app, ["watch", "--out", "."]).output
    row = shown.splitlines()[1].split("\t")
    assert row[:5] == ["tiny", "20260101-000000-abcdef", "dense", "100 %", "3"], shown
    assert row[7] == "0.250" and len(row[6]) >= 3, shown


def test_trackers_get_parameters_and_figures(finished, tmp_path, monkeypatch):
    made, runs = finished
    (tmp_path / "trackio.py").write_text("""sent = []
def init(**about): sent.append(about)
def log(figures): sent.append(figures)
def finish(): pass
""")
    monkeypatch.syspath_prepend(str(tmp_path))
    tracker = find_tracker("trackio")
    run = PlannedRun(Experiment(made / "nbs/experiments/tiny.ipynb"), "smoke", {"x": 1.0}, {}, Resources(), "")
    track(tracker, "many", run, runs[0])
    config = {"experiment": "tiny", "profile": "smoke", "x": 1.0}
    about = {"project": "dendritic_lab", "group": "many", "name": runs[0].name, "config": config}
    assert tracker.sent == [about, {"tiny.score": 1.0}]
