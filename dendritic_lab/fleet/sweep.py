"""A sweep file becomes a checked search over an experiment's parameters.

    experiment: dsn
    profile: quick
    metric: dsn.accuracy       # of metrics.json; choose on validation data, never on a test set
    direction: maximize        # or minimize
    trials: 30
    sampler: tpe               # tpe, grid or random
    seed: 0                    # of the sampler
    parameters: {seeds: 1}     # for every trial
    search:
      lr: {low: 1.0e-5, high: 1.0e-2, log: true}
      epochs: {low: 1, high: 5}
      dropout: [0.0, 0.1, 0.3]
    prune: {figure: accuracy, after: 3}   # median pruning from what `fit` reports, once 3 trials are complete
    resources: {gpus: 1}
    storage: journal           # a file that several machines may share; or a URL such as postgresql://...
"""

import re
from dataclasses import dataclass
from pathlib import Path

from dendritic_lab.fleet.checked_yaml import Lines, read_yaml
from dendritic_lab.fleet.engine import Resources
from dendritic_lab.fleet.plan import file_id, known_experiment, read_resources
from dendritic_lab.lab.experiments import Experiment

DEFAULTS = {"experiment": None, "profile": "quick", "metric": None, "direction": "maximize", "trials": 20,
            "sampler": "tpe", "seed": 0, "parameters": {}, "search": None, "prune": None, "resources": {},
            "storage": "journal"}
CHOICES = {"direction": ("maximize", "minimize"), "sampler": ("tpe", "grid", "random")}
LIMITS = {"trials": (1, 100_000), "seed": (0, 2**31)}


@dataclass(frozen=True)
class Bounds:
    "Values from `low` to `high`, both included."
    low: float
    high: float
    log: bool
    integer: bool


Space = dict[str, Bounds | list]


@dataclass(frozen=True)
class Sweep:
    "A sweep file, read and checked."
    file: Path
    experiment: Experiment
    profile: str
    metric: str
    direction: str
    trials: int
    sampler: str
    seed: int
    parameters: dict
    search: Space
    prune: tuple[str, int] | None  # figure, complete trials before the first is pruned
    resources: Resources
    storage: str

    @property
    def id(self) -> str: return file_id(self.file, "sweep")


def read_sweep(
    file: Path,
    root: Path | None = None,  # checkout; None: the one around the current folder
) -> Sweep:
    "Read and check a sweep file. Raises `UsageError` with the file's line."
    content, lines = read_yaml(file)
    if not isinstance(content, dict): raise lines.error("expected a mapping with `experiment`, `metric` and `search`")
    lines.known_keys(content, DEFAULTS)
    for key in ("experiment", "metric", "search"):
        if key not in content: raise lines.error(f"`{key}` is missing")
    content = {**DEFAULTS, **content}
    _check_scalars(content, lines)
    experiment = known_experiment(content["experiment"], "smoke", lines, ("experiment",), root)
    known_experiment(content["experiment"], content["profile"], lines, ("profile",), root)
    fixed = lines.mapping(content["parameters"], "parameters", "parameters")
    for name, value in fixed.items(): lines.parameter(experiment, name, value, "parameters", name)
    search = _search(content["search"], experiment, lines)
    for name in search.keys() & fixed.keys():
        raise lines.error(f"{name} is set twice, in parameters and in search", "search", name)
    if content["sampler"] == "grid" and any(isinstance(s, Bounds) and not s.integer for s in search.values()):
        raise lines.error("sampler grid: give lists of values or ranges of whole numbers", "search")
    checked = {"experiment": experiment, "search": search, "prune": _prune(content["prune"], lines),
               "resources": read_resources(content["resources"], lines, "resources")}
    return Sweep(Path(file), **{**content, **checked})


def _check_scalars(content: dict, lines: Lines):
    "Text, choices and whole numbers."
    for key in ("experiment", "profile", "metric", "direction", "sampler", "storage"):
        if not isinstance(content[key], str) or not content[key]:
            raise lines.error(f"{key}: expected text, got {content[key]!r}", key)
    for key, allowed in CHOICES.items():
        if content[key] not in allowed:
            raise lines.error(f"{key}: expected {' or '.join(allowed)}, got {content[key]!r}", key)
    for key, (least, most) in LIMITS.items():
        if type(content[key]) is not int or not least <= content[key] <= most:
            raise lines.error(f"{key}: expected a whole number from {least} to {most}, got {content[key]!r}", key)
    storage = content["storage"]
    if storage != "journal" and not re.match(r"[a-z0-9+]+://", storage):
        raise lines.error(f"storage: expected journal or a URL such as postgresql://..., got {storage!r}", "storage")


def _prune(value: object, lines: Lines) -> tuple[str, int] | None:
    if value is None: return None
    match value:
        case {"figure": str(figure), "after": int(after), **rest} if not rest and after is not True and after >= 1:
            return figure, after
    expected = "figure and after, such as {figure: accuracy, after: 3}"
    raise lines.error(f"prune: expected {expected}, got {value!r}", "prune")


def _search(value: object, experiment: Experiment, lines: Lines) -> Space:
    "The space of the search; both ends of a range and every choice are checked as parameters."
    found = {}
    for name, space in lines.mapping(value, "search", "search").items():
        find = _choices if isinstance(space, list) and space else _bounds
        found[name] = find(name, space, experiment, lines)
    if not found: raise lines.error("search: expected at least one parameter", "search")
    return found


def _choices(name: str, space: list, experiment: Experiment, lines: Lines) -> list:
    values = [lines.parameter(experiment, name, value, "search", name, i) for i, value in enumerate(space)]
    if any(isinstance(v, list) for v in values):
        raise lines.error(f"search: {name} takes lists, which cannot be searched", "search", name)
    return values


def _bounds(name: str, space: object, experiment: Experiment, lines: Lines) -> Bounds:
    refuse = lambda message, *path: lines.error(message, "search", name, *path)
    if not (isinstance(space, dict) and {"low", "high"} <= space.keys() <= {"low", "high", "log"}):
        raise refuse(f"search: expected for {name} a list of values or low, high and log, got {space!r}")
    low, high = (lines.parameter(experiment, name, space[end], "search", name, end) for end in ("low", "high"))
    kind, log = experiment.parameters[name].type, space.get("log", False)
    if kind not in ("int", "float"): raise refuse(f"search: {name} is no number; give a list of values")
    if type(log) is not bool: raise refuse(f"log: expected true or false, got {log!r}", "log")
    if not low < high or log and low <= 0:
        above = " and above 0" if log else ""
        raise refuse(f"search: expected low below high{above}, got {low} and {high}")
    return Bounds(low, high, log, kind == "int")
