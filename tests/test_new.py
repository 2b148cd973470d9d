"""`dendritic-lab new experiment` writes an experiment that runs and a test that passes."""

import shutil
import subprocess
import sys


def test_a_new_experiment_runs_and_its_smoke_test_passes(lab, root, tmp_path):
    checkout = tmp_path / "checkout"
    (checkout / "nbs/experiments").mkdir(parents=True)
    (checkout / "tests").mkdir()
    for name in ("settings.ini", "pyproject.toml"): shutil.copy(root / name, checkout)
    shutil.copy(root / "tests/conftest.py", checkout / "tests")
    done = lab(checkout, "new", "experiment", "my_idea")
    assert done.returncode == 0 and "nbs/experiments/my_idea.ipynb" in done.stdout, done.stderr
    again = lab(checkout, "new", "experiment", "my_idea")
    assert again.returncode == 2 and "is there already" in again.stderr
    assert lab(checkout, "new", "experiment", "../away").returncode == 2
    assert "Does one dendrite" in lab(checkout, "list").stdout
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", checkout]
    smoke = subprocess.run([*pytest, "tests"], cwd=checkout, capture_output=True, text=True)
    assert smoke.returncode == 0 and "1 passed" in smoke.stdout, smoke.stdout + smoke.stderr
