"""Weights & Biases and trackio have the same three functions. Nothing is sent unless one of them is named."""

import logging
from importlib import import_module
from pathlib import Path

from dendritic_lab.fleet.plan import PlannedRun
from dendritic_lab.lab.experiments import UsageError
from dendritic_lab.lab.metrics import read_metrics

TRACKERS = ("wandb", "trackio")


def find_tracker(name: str):
    "The tracker's module. Raises `UsageError` for one that is unknown or not installed."
    if name not in TRACKERS: raise UsageError(f"unknown tracker {name!r}; known: {', '.join(TRACKERS)}")
    try: return import_module(name)
    except ImportError: raise UsageError(f"the tracker {name} is not installed: pip install {name}") from None


def track(tracker, group: str, run: PlannedRun, folder: Path):
    "Hand parameters and figures of a finished run to a tracker. What goes wrong with it is said, and stops nothing."
    figures = {m["name"]: m["value"] for m in read_metrics(folder / "metrics.json")["metrics"]}
    about = {"experiment": run.experiment.name, "profile": run.profile, **run.parameters}
    try:
        tracker.init(project="dendritic_lab", group=group, name=folder.name, config=about)
        tracker.log(figures)
        tracker.finish()
    except Exception as e:
        logging.getLogger("dendritic_lab").warning("dendritic-lab: the tracker failed for %s: %s", folder.name, e)
