"""A batch file becomes planned runs; all of it is checked before anything starts.

A batch file is YAML, one section or a list of sections:

    experiments: [dsn]             # names; see `dendritic-lab list`
    profiles: quick                # one or a list; quick where it is left out
    parameters: {data: embedded}   # for every run
    grid: {lr: [1e-3, 3e-4], epochs: [1, 3]}   # every combination
    list: [{dropout: 0.0}, {dropout: 0.3}]     # and each of these
    seeds: 5                       # a number, or a list of seeds
    resources: {cpus: 2, gpus: 0.5}  # of each run

An experiment with a parameter `seed` gets a run for each seed. One with a parameter `seeds` trains from several
seeds itself, and is handed their number.
"""

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dendritic_lab.fleet.checked_yaml import Lines, read_yaml
from dendritic_lab.fleet.engine import Resources
from dendritic_lab.fleet.identity import digest, digest_folder, identity
from dendritic_lab.lab.experiments import Experiment, UsageError, find_experiment

MOST_RUNS = 10_000
KEYS = ("experiments", "profiles", "parameters", "grid", "list", "seeds", "resources")


@dataclass(frozen=True)
class PlannedRun:
    "One run of a batch."
    experiment: Experiment
    profile: str
    parameters: dict  # effective
    given: dict  # those that the file sets
    resources: Resources
    identity: str

    def __str__(self) -> str:
        return " ".join([self.experiment.name, self.profile, *(f"{k}={v}" for k, v in self.given.items())])


@dataclass(frozen=True)
class Plan:
    "A batch file, read and checked."
    file: Path
    runs: tuple[PlannedRun, ...]  # each identity once
    repeated: int  # how many were named again

    @property
    def id(self) -> str:
        "The file's name and 8 digits over the identities of its runs."
        return f"{file_id(self.file, 'batch')}-{digest(*sorted(r.identity for r in self.runs))[:8]}"


def file_id(file: Path, default: str) -> str:
    "The file's name in small letters, digits and dashes."
    return re.sub(r"[^a-z0-9]+", "-", file.stem.lower()).strip("-")[:40] or default


def read_plan(
    file: Path,
    root: Path | None = None,  # checkout; None: the one around the current folder
) -> Plan:
    "Read and check a batch file. Raises `UsageError` with the file's line for the first thing that cannot be."
    file = Path(file)
    content, lines = read_yaml(file)
    if isinstance(content, dict): sections = [(content, ())]
    elif isinstance(content, list) and content: sections = [(section, (i,)) for i, section in enumerate(content)]
    else: raise lines.error("expected a mapping with `experiments`, or a list of such")
    digest_folder.cache_clear()
    runs, total = {}, 0
    for section, at in sections:
        for run in _read_section(section, lines, at, root):
            total += 1
            runs.setdefault(run.identity, run)
            if len(runs) > MOST_RUNS: raise lines.error(f"these are more than {MOST_RUNS:,} runs", *at)
    return Plan(file, tuple(runs.values()), total - len(runs))


def _read_section(section: object, lines: Lines, at: tuple, root: Path | None) -> Iterator[PlannedRun]:
    "The runs of one section."
    lines.known_keys(lines.mapping(section, "a section", *at), KEYS, *at)
    if "experiments" not in section: raise lines.error("`experiments` is missing", *at)
    resources = read_resources(section.get("resources", {}), lines, *at, "resources")
    for name, place in _names(section, "experiments", None, lines, at):
        experiment = known_experiment(name, "smoke", lines, place, root)
        for profile, where in _names(section, "profiles", ["quick"], lines, at):
            known_experiment(name, profile, lines, where, root)
            for given in _settings(section, experiment, lines, at):
                parameters = experiment.resolve(profile, given)
                given = {k: parameters[k] for k in given}
                yield PlannedRun(experiment, profile, parameters, given, resources, identity(experiment, parameters))


def known_experiment(name: str, profile: str, lines: Lines, path: tuple, root: Path | None) -> Experiment:
    "The experiment `name`, which has this profile. Raises `UsageError` with the line at `path`."
    try:
        experiment = find_experiment(name, root)
        experiment.resolve(profile)
    except UsageError as e: raise lines.error(str(e), *path) from None
    return experiment


def _names(section: dict, key: str, default, lines: Lines, at: tuple) -> list[tuple[str, tuple]]:  # (name, its place)
    "One name or a list of names."
    value = section.get(key, default)
    if isinstance(value, str): return [(value, (*at, key))]
    if not (isinstance(value, list) and value and all(isinstance(v, str) for v in value)):
        raise lines.error(f"{key}: expected a name or a list of names, got {value!r}", *at, key)
    if len(set(value)) < len(value): raise lines.error(f"{key}: a name is given twice", *at, key)
    return [(name, (*at, key, i)) for i, name in enumerate(value)]


def read_resources(value: object, lines: Lines, *at) -> Resources:
    "The resources of a run. Raises `UsageError` with the file's line."
    value = lines.mapping(value, "resources", *at)
    for key in value:
        if key not in ("cpus", "gpus"): raise lines.error(f"resources: expected cpus and gpus, got {key!r}", *at, key)
    cpus, gpus = value.get("cpus"), value.get("gpus")
    if "cpus" in value and not (type(cpus) is int and 1 <= cpus <= 4096):
        raise lines.error(f"cpus: expected a whole number from 1 to 4096, got {cpus!r}", *at, "cpus")
    if "gpus" in value and not _is_share(gpus):
        raise lines.error(f"gpus: expected a share below 1 or a whole number, got {gpus!r}", *at, "gpus")
    return Resources(cpus, gpus)


def _is_share(gpus: object) -> bool:
    if type(gpus) not in (int, float) or not math.isfinite(gpus): return False
    return 0 <= gpus < 1 or gpus <= 1024 and gpus == int(gpus) >= 0


def _settings(section: dict, experiment: Experiment, lines: Lines, at: tuple) -> Iterator[dict]:
    """What the file sets for each run of one experiment: parameters, with every combination of the grid, every entry
    of the list and every seed. Each value is checked where it stands, so that the error can name its line."""
    fixed = lines.mapping(section.get("parameters", {}), "parameters", *at, "parameters")
    for name, value in fixed.items(): lines.parameter(experiment, name, value, *at, "parameters", name)
    grid = _grid(section, experiment, fixed, lines, at)
    entries = _entries(section, experiment, {"parameters": fixed, "grid": grid}, lines, at)
    seeds = _seeds(section, experiment, {*fixed, *grid, *(name for e in entries for name in e)}, lines, at)
    if len(seeds) * len(entries) * math.prod(map(len, grid.values())) > MOST_RUNS:
        raise lines.error(f"these are more than {MOST_RUNS:,} runs", *at)
    for entry, values, seed in itertools.product(entries, itertools.product(*grid.values()), seeds):
        yield {**fixed, **dict(zip(grid, values)), **entry, **seed}


def _grid(section: dict, experiment: Experiment, fixed: dict, lines: Lines, at: tuple) -> dict[str, list]:
    grid = lines.mapping(section.get("grid", {}), "grid", *at, "grid")
    for name, values in grid.items():
        place = (*at, "grid", name)
        if not isinstance(values, list) or not values:
            raise lines.error(f"grid: expected a list of values for {name}, got {values!r}", *place)
        if name in fixed: raise lines.error(f"{name} is set twice, in parameters and in grid", *place)
        for i, value in enumerate(values): lines.parameter(experiment, name, value, *place, i)
    return grid


def _entries(section: dict, experiment: Experiment, set_in: dict[str, dict], lines: Lines, at: tuple) -> list[dict]:
    entries = section.get("list", [{}])
    if not isinstance(entries, list) or not entries:
        raise lines.error(f"list: expected a list of mappings, got {entries!r}", *at, "list")
    for i, entry in enumerate(entries):
        for name, value in lines.mapping(entry, "list", *at, "list", i).items():
            place = (*at, "list", i, name)
            for other, names in set_in.items():
                if name in names: raise lines.error(f"{name} is set twice, in {other} and in list", *place)
            lines.parameter(experiment, name, value, *place)
    return entries


def _seeds(section: dict, experiment: Experiment, set_already: set[str], lines: Lines, at: tuple) -> list[dict]:
    "What each seed sets: `seed` for a run each, or once `seeds`, where the experiment has only that."
    if "seeds" not in section: return [{}]
    value, place = section["seeds"], (*at, "seeds")
    count = type(value) is int and 1 <= value <= MOST_RUNS
    listed = isinstance(value, list) and value and all(type(s) is int and 0 <= s < 2**31 for s in value)
    if not (count or listed and len(set(value)) == len(value)):
        expected = "how many, from 1, or a list of different seeds of at least 0"
        raise lines.error(f"seeds: expected {expected}, got {value!r}", *place)
    if "seed" in experiment.parameters: seeds = [{"seed": s} for s in (range(value) if count else value)]
    elif count and "seeds" in experiment.parameters: seeds = [{"seeds": value}]
    else:
        hint = "; give their number, which it has a parameter for" if "seeds" in experiment.parameters else ""
        raise lines.error(f"{experiment.name} has no parameter 'seed'{hint}", *place)
    for given in seeds:
        for name, one in given.items():
            if name in set_already: raise lines.error(f"{name} is set twice", *place)
            lines.parameter(experiment, name, one, *place)
    return seeds
