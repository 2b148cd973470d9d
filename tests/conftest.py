"""Fixtures that several tests share."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[1]
COMMAND = [sys.executable, "-c", "from dendritic_lab.cli import main; main()"]


def metrics_json(name: str, value: float, unit: str = "count") -> dict:
    "The content of a metrics.json with one figure."
    metric = {"name": name, "value": value, "unit": unit, "values": [value], "seeds": [], "interval": None,
              "confidence": 0.95, "basis": "one value", "measured_by": "results", "null": None,
              "claims": [], "where": {}, "setting": "",
              "headline": False}
    return {"schema": 2, "experiment": name.partition(".")[0], "metrics": [metric], "data": []}


def record_by_hand(name: str, expression: str) -> str:
    "A cell that writes metrics.json itself: a kernel without torch is ready in a fraction of the time."
    return f"""import json, os, pathlib
content = {metrics_json(name, 0)!r}
content["metrics"][0] |= {{"value": {expression}, "values": [{expression}]}}
_ = pathlib.Path(os.environ["DENDRITIC_LAB_RUN"], "metrics.json").write_text(json.dumps(content))"""


@pytest.fixture
def root() -> Path:
    return ROOT


def made_checkout(folder: Path, *cells: str, parameters: str = "times: int = 2  # how often; 1..5",
                  profiles: str = "") -> Path:
    "A checkout with one experiment `tiny`, made of the given code cells."
    head = new_markdown_cell("# Tiny\n\n> Does it run?")
    tagged = new_code_cell(parameters, metadata={"tags": ["parameters"]})
    notebook = new_notebook(
        cells=[head, tagged, *map(new_code_cell, cells)],
        metadata={"kernelspec": {"name": "python3", "display_name": "python3", "language": "python"}})
    checkout = folder / "checkout"
    (checkout / "nbs/experiments").mkdir(parents=True)
    (checkout / "settings.ini").touch()
    nbformat.write(notebook, checkout / "nbs/experiments/tiny.ipynb")
    (checkout / "nbs/experiments/tiny.yaml").write_text(profiles or "quick: {times: 3}\n")
    return checkout


@pytest.fixture
def make_checkout(tmp_path):
    "`made_checkout` in the test's own folder."
    return partial(made_checkout, tmp_path)


@pytest.fixture
def lab():
    "Run the command line in a folder; returns the finished process."
    def run(folder: Path, *words: str, timeout: float = 600, **environment: str) -> subprocess.CompletedProcess:
        modules = ("dendritic_lab.cli", "dendritic_lab.lab.runs", "dendritic_lab.lab.experiments")
        ours = ",".join(f"error:::{module}" for module in modules)
        variables = {k: v for k, v in os.environ.items() if k != "DENDRITIC_LAB_DATA"}
        variables |= {"PYTHONWARNINGS": ours} | environment
        command = [*COMMAND, *words]
        return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=timeout)
    return run


@pytest.fixture
def ask(monkeypatch):
    "Ask the command line in a folder without a process of its own, where nothing is started; returns its result."
    def run(folder: Path, *words: str):
        from dendritic_lab.cli import app
        monkeypatch.chdir(folder)
        return CliRunner().invoke(app, words)
    return run


@pytest.fixture
def record() -> str:
    "A cell that records one figure and finishes."
    return """from dendritic_lab.lab.record import Recorder
recorder = Recorder('tiny')
recorder.metric('tiny.times', times, 'count')
recorder.finish().name"""
