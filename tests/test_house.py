"""The way through the house is one-directional: a module imports from what stands before it, and no private names."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("house")  # one worker: what its tests share is made once

ROOT = Path(__file__).resolve().parents[1]
# Folders that stand on one line may use what stands on the lines above.
ORDER = [{"", "torchvision_ops", "extras"}, {"measure", "data"}, {"layers"}, {"models"}, {"evaluate"}, {"training"},
         {"pruning", "growth", "perforation"}, {"lab"}, {"fleet"}, {"cli"}]
PLACE = {folder: place for place, folders in enumerate(ORDER) for folder in folders}


def modules() -> dict[str, Path]:
    "Every module of the package by its dotted name."
    paths = [p for p in (ROOT / "dendritic_lab").rglob("*.py") if p.name != "_modidx.py" and "templates" not in p.parts]
    return {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in paths}


def imports(name: str, path: Path, known: dict[str, Path]) -> set[tuple[str, str]]:
    "(module, name that is taken from it) of every import from the package, inside functions too."
    package, found = name if path.name == "__init__.py" else name.rpartition(".")[0], set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom): continue
        above = package.split(".")[:len(package.split(".")) - node.level + 1] if node.level else []
        source = ".".join([*above, *([node.module] if node.module else [])])
        for alias in node.names:
            module = f"{source}.{alias.name}"
            if module in known: found.add((module, ""))
            elif source in known: found.add((source, alias.name))
    return {(module, taken) for module, taken in found if module != name}


@pytest.fixture(scope="module")
def graph() -> dict[str, set[tuple[str, str]]]:
    known = modules()
    return {name: imports(name, path, known) for name, path in known.items()}


def test_no_module_is_in_a_circle(graph):
    TopologicalSorter({name: {module for module, _ in taken} for name, taken in graph.items()}).prepare()


def test_no_module_takes_a_private_name(graph):
    taken = [(name, *of) for name, found in graph.items() for of in found]
    assert [t for t in taken if t[2].startswith("_") and not t[2].endswith("__")] == []


def test_a_module_uses_what_stands_before_its_folder(graph):
    folder = lambda module: (module.split(".") + [""])[1]
    wrong = [(name, module) for name, taken in graph.items() for module, _ in taken
             if folder(name) and folder(module) != folder(name) and PLACE[folder(module)] >= PLACE[folder(name)]]
    assert sorted(set(wrong)) == []
