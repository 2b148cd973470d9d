"""The beginning of an experiment: a notebook with a parameters cell, its profiles and a smoke test, which run as they
are, so that one changes something that works. The files beside this one, in `templates/`, are what is written."""

import re
from pathlib import Path

from dendritic_lab.lab.experiments import UsageError, project_root

TEMPLATES = Path(__file__).parent / "templates"
TARGETS = {"experiment.ipynb": "nbs/experiments/{}.ipynb", "experiment.yaml": "nbs/experiments/{}.yaml",
           "test_experiment.py": "tests/test_experiment_{}.py"}


def new_experiment(
    name: str,  # small letters, digits and _, beginning with a letter
    root: Path | None = None,  # the checkout; None: the one around the current folder
) -> list[Path]:  # what was written
    """Write notebook, profiles and smoke test of a new experiment. Raises `UsageError` for another kind of name, or one
    that is taken."""
    root = root or project_root()
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        expected = "an experiment's name has small letters, digits and _, and begins with a letter"
        raise UsageError(f"{expected}; got {name!r}")
    files = {template: root / target.format(name) for template, target in TARGETS.items()}
    taken = [str(path.relative_to(root)) for path in files.values() if path.exists()]
    if taken: raise UsageError(f"{', '.join(taken)} is there already; choose another name")
    title = name.replace("_", " ").capitalize()
    for template, path in files.items():
        text = (TEMPLATES / template).read_text(encoding="utf-8").replace("TITLE", title).replace("NAME", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return list(files.values())
