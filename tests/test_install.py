"""What each command installs: complete, exact, and enough for what it does. Extras that are missing are named."""

import os
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "requirements"))

import update  # noqa: E402

HEAVY = {"ray", "optuna", "peft", "torchao", "gguf", "reasoning-gym", "lm-eval", "jupyterlab", "smalldocs",
         "playwright", "pytest", "hypothesis", "nbdev", "tensorboard"}
# Python finds nothing of what the set does not have, as if it were not installed; setuptools has copies of its own.
BLOCKING = """import sys
from importlib.machinery import PathFinder

class DemoOnly(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name in {blocked!r}: path = [folder for folder in sys.path if folder.endswith("_vendor")]
        return super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = DemoOnly"""
EVERY_MODULE = """import importlib, pkgutil, dendritic_lab
names = [m.name for m in pkgutil.walk_packages(dendritic_lab.__path__, "dendritic_lab.") if ".templates" not in m.name]
for name in names: importlib.import_module(name)
assert len(names) > 100, names"""
LAB = ["-c", "from dendritic_lab.cli import main; main()"]


def names(file: str) -> set[str]:
    lines = (ROOT / f"requirements/{file}.txt").read_text().splitlines()
    return {canonicalize_name(line.split("==")[0]) for line in lines if not line.startswith("#")}


@pytest.mark.skipif(sys.platform != "linux" or sys.version_info[:2] != (3, 11), reason="written on Linux, Python 3.11")
@pytest.mark.parametrize("file", update.SETS)
def test_files_are_complete_and_in_step(file):
    assert (ROOT / f"requirements/{file}.txt").read_text() == update.content(file), "run: python requirements/update.py"


def test_each_set_lies_within_that_of_the_tests_and_demo_within_each():
    assert names("demo") <= names("lab") & names("docs") and names("lab") | names("docs") <= names("test")


def test_demo_has_no_package_of_an_extra(): assert not names("demo") & HEAVY


def test_torch_has_one_version_everywhere():
    lines = [line for file in (ROOT / "requirements").glob("*.txt") for line in file.read_text().splitlines()]
    assert {line for line in lines if line.startswith("torch==")} == {update.pins()["torch"]}


@pytest.fixture(scope="module")
def demo_only(tmp_path_factory):  # runs Python as if only demo's packages were installed
    folder, demo = tmp_path_factory.mktemp("demo_only"), names("demo") | {"dendritic-lab", "pip"}
    blocked = {module for module, packages in packages_distributions().items()
               if not demo & set(map(canonicalize_name, packages))}
    assert {"ray", "pytest", "fastcore", "lm_eval"} <= blocked and "torch" not in blocked
    (folder / "sitecustomize.py").write_text(BLOCKING.format(blocked=blocked))
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = {"env": os.environ | {"PYTHONPATH": path}, "capture_output": True, "text": True, "timeout": 600}
    return lambda *words: subprocess.run([sys.executable, *words], cwd=ROOT, **settings)


def test_every_module_imports_with_demos_packages_only(demo_only):
    done = demo_only("-c", EVERY_MODULE)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("command", ["list", "doctor"])
def test_commands_work_with_demos_packages_only(demo_only, command):
    done = demo_only(*LAB, command)
    assert done.returncode == 0, done.stderr[-3000:]


MISSING = {
    "from dendritic_lab.growth.quantised import quantise; quantise(None)": ("quantising needs torchao", "llm"),
    "from dendritic_lab.growth.adapters import lora; lora(None, 1)": ("LoRA needs peft", "llm"),
    "from dendritic_lab.data.gsm8k import gsm_symbolic; gsm_symbolic({'train': 1})": (
        "gsm_symbolic needs reasoning-gym", "llm"),
    "from dendritic_lab.evaluate.harness import main; main()": ("dendritic-lm-eval needs lm-eval", "eval"),
    "from dendritic_lab.fleet.study import import_optuna; import_optuna()": ("sweep needs optuna", "cluster"),
    "from dendritic_lab.fleet.cluster import RayEngine; RayEngine(None, '', None, None)": (
        "the engine ray needs ray", "cluster"),
}
SAY = f"""for code in {list(MISSING)}:
    try: exec(code)
    except (Exception, SystemExit) as e: print(e)"""


def test_what_is_missing_is_one_line_with_its_extra_and_the_command(demo_only):
    done = demo_only("-c", SAY)
    lines = [f'{what}, of the extra {extra}; run: pip install -c constraints.txt -e ".[{extra}]"'
             for what, extra in MISSING.values()]
    assert done.stdout.splitlines() == lines, done.stderr[-3000:]


def test_the_command_line_ends_with_that_line(demo_only):
    done = demo_only("-c", """import typer
from dendritic_lab.cli.show import clear_errors
from dendritic_lab.extras import optional
def command(): optional("ray", "the engine ray")
typer.run(clear_errors(command))""")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("dendritic-lab: the engine ray needs ray, of the extra cluster; run: pip install")


def test_pips_log_says_how_long_each_package_took_to_fetch(tmp_path):
    sys.path.insert(0, str(ROOT / "tests/benchmarks"))
    import install
    line = "2026-11-22T18:20:{},662 2 location(s) to search for versions of {}:\n".format
    log = tmp_path / "pip.log"
    found = "2026-11-22T18:20:01,000   Found link\n"
    log.write_text(line("00", "six") + found + line("02", "A_b") + line("05", "last"))
    assert install.downloads(log) == {"six": 2.0, "a-b": 3.0}
