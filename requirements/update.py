"""Write what each command installs, exactly: `python requirements/update.py`, after a change of pyproject.toml or pins.

A file has every package that the project, with the extras of that command, requires directly or through others, as
the environment that runs this has them installed, in the versions of constraints.txt. So pip need not resolve
anything: it installs them with --no-deps. The files are written on Linux with Python 3.11. What another system or
Python needs besides, and the NVIDIA packages that a CUDA build of torch pins itself, pip adds in a second step.
"""

import re
import tomllib
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
SETS = {"demo": [], "lab": ["lab"], "docs": ["docs"], "test": ["dev", "docs", "trackers"]}
PROJECT = "dendritic-lab"
NOT_OURS = re.compile(r"pip$|nvidia-(?!ml-py)|cuda-")  # comes with the environment; with torch's CUDA build


def pins() -> dict[str, str]:
    "The line of constraints.txt for each package."
    lines = (line.strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    return {canonicalize_name(line.split("==")[0]): line for line in lines if line and not line.startswith("#")}


def declared() -> list[Requirement]:
    "What pyproject.toml requires: extras have their marker, like an installed package's."
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [f"{line.partition(';')[0]}; extra == '{extra}'"
              for extra, lines in project["optional-dependencies"].items() for line in lines]
    return [Requirement(line) for line in [*project["dependencies"], "setuptools>=77", *extras]]


def required(name: str, extra: str) -> list[Requirement]:
    "What a package requires, with one of its extras, on this machine."
    everything = declared() if name == PROJECT else map(Requirement, distribution(name).requires or [])
    return [r for r in everything if r.marker is None or r.marker.evaluate({"extra": extra})]


def closure(extras: list[str]) -> set[str]:  # canonical names
    "Every package that the project requires with these extras, directly or through others."
    todo, seen = [(PROJECT, extra) for extra in ["", *extras]], set()
    while todo:
        seen.add(current := todo.pop())
        for requirement in required(*current):
            name = canonicalize_name(requirement.name)
            if NOT_OURS.match(name): continue
            todo += {(name, extra) for extra in ["", *requirement.extras]} - seen
    return {name for name, _ in seen} - {PROJECT}


def content(name: str) -> str:
    "What the file of a set should have. Raises `KeyError` for a package without a pin."
    markers = {canonicalize_name(r.name): f"; {r.marker}" for r in declared() if r.marker and not r.extras
               and "extra" not in str(r.marker)}
    known = pins()
    lines = sorted((known[package] + markers.get(package, "") for package in closure(SETS[name])), key=str.lower)
    return "\n".join(["# written by requirements/update.py from pyproject.toml and constraints.txt", *lines, ""])


if __name__ == "__main__":
    for name in SETS: (ROOT / f"requirements/{name}.txt").write_text(content(name))
