"""`make demo` in a fresh clone: what a new user meets first.

The clone's environment is made by make and has demo's packages only. They are linked from the environment of the tests,
where pip has put the same versions: pip finds each in place and is kept off the index, so a package that demo needs and
its list lacks is missed here as it would be there. tests/benchmarks/install.py also downloads them.
"""

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution, distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from dendritic_lab.data import load

ROOT = Path(__file__).resolve().parents[1]
OURS = ("DENDRITIC_LAB", "HF_", "OMP_", "PYTHON", "PYTEST", "TRITON", "MPL", "IN_TEST", "VIRTUAL_ENV")
REPORT = re.compile(r'<a href="([^"]*report\.html)">')

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists() or not shutil.which("make"), reason="needs git and make")


def demos_packages(clone: Path) -> list[str]:
    "The names in requirements/demo.txt that are for this system, and what a CUDA build of torch brings."
    lines = (clone / "requirements/demo.txt").read_text().splitlines()
    wanted = [Requirement(line) for line in lines if not line.startswith("#")]
    listed = [r.name for r in wanted if r.marker is None or r.marker.evaluate()]
    return listed + [d.name for d in distributions() if d.name.startswith(("nvidia-", "cuda-"))]


def link(packages: list[str], environment: Path):
    "Put packages into an environment as links to what pip installed for the tests; programs are left out."
    own = next(environment.glob("lib/python*/site-packages"))
    for name in packages:
        try: package = distribution(name)
        except PackageNotFoundError: continue  # pip says which one it wants
        for file in package.files:
            folder = package.locate_file(file.parts[0])  # one link is enough for a module or what pip notes about it
            if (folder / "__init__.py").is_file() or folder.suffix == ".dist-info": file = Path(file.parts[0])
            found, target = package.locate_file(file), Path(os.path.normpath(own / file))
            if not target.is_relative_to(environment) or target.parent.name == "bin" or target.exists(): continue
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(found)


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    "A clone of the commit that is checked out, with an environment that lacks only our own package."
    made = tmp_path_factory.mktemp("user") / "dendritic_lab"
    subprocess.run(["git", "clone", "-q", ROOT, made], check=True)
    subprocess.run(["make", f"PYTHON={sys.executable}", ".venv/bin/python"], cwd=made, check=True, capture_output=True)
    old = [made / ".venv/bin/python", "-m", "pip", "uninstall", "-q", "-y", "setuptools"]  # venv's own, in Python 3.11
    subprocess.run(old, check=True, capture_output=True)
    link(demos_packages(made), made / ".venv")
    return made


@pytest.fixture(scope="module")
def make_demo(clone):
    "Run `make demo` there without an index."
    for data in ("sst2", "literature"): load(data, source="embedded")  # in the user's cache, if they were not
    user = {k: v for k, v in os.environ.items() if not k.startswith(OURS)} | {"PIP_NO_INDEX": "1", "NO_COLOR": "1"}
    run = lambda: subprocess.run(["make", "demo"], cwd=clone, env=user, capture_output=True, text=True, timeout=3600)
    return run


def test_make_demo_in_a_fresh_clone(clone, make_demo):
    done = make_demo()
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert "Downloading" not in done.stdout and "Successfully installed dendritic_lab" in done.stdout
    assert "5 done" in done.stdout and "failed" not in done.stdout
    said = done.stdout.partition("5 done")[2]
    systems = ["DSN", "Perforation", "Dendritic language model", "Liquid ViT", "Growth"]
    assert re.findall(r"^([A-Z][A-Za-z ]+): \S", said, re.M) == systems, said
    assert "with pictures: outputs/demo/index.html" in said and "next: dendritic-lab list" in said
    page = clone / "outputs/demo/index.html"
    content = page.read_text(encoding="utf-8")
    assert content.count("<section>") == content.count('<img src="data:image/png;base64,') == 5
    reports = [(page.parent / link).resolve() for link in REPORT.findall(content)]
    assert len(reports) == 5 and all(report.is_file() for report in reports)
    assert subprocess.run(["git", "status", "--porcelain"], cwd=clone, capture_output=True).stdout == b""

    again = make_demo()  # nothing is installed or run a second time
    assert again.returncode == 0 and "5 reused" in again.stdout and "pip" not in again.stdout, again.stdout[-3000:]
    assert again.stdout.partition("5 reused")[2] == said
