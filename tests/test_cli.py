"""The command line's other commands."""

import json
import re
import subprocess
import sys

from dendritic_lab.lab.experiments import find_experiments


def test_help_needs_no_torch(tmp_path):
    code = """import sys
from typer.testing import CliRunner
from dendritic_lab.cli import app
done = CliRunner().invoke(app, ['--help'])
print(done.exit_code, 'torch' in sys.modules, 'papermill' in sys.modules)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.split() == ["0", "False", "False"]


def test_list_names_every_parameter(ask, root):
    done = ask(root, "list", "dsn")
    assert done.exit_code == 0
    for word in ("dsn:", "quick", "word_dropout", "auto|local|hub|embedded"): assert word in done.stdout


def test_every_profile_of_every_experiment_is_allowed(ask, root):
    for name, experiment in find_experiments(root).items():
        for profile in experiment.profiles: assert experiment.resolve(profile), (name, profile)
        assert ask(root, "list", name).exit_code == 0, name


def test_list_has_one_line_an_experiment(ask, root):
    names = [path.stem for path in (root / "nbs/experiments").glob("*.ipynb")]
    done = ask(root, "list")
    assert done.exit_code == 0, done.stderr
    for name in names: assert sum(f"│ {name} " in line for line in done.stdout.splitlines()) == 1


def test_claims_are_joined_with_the_reference_runs(ask, root):
    done = ask(root, "claims", "--json")
    assert done.exit_code == 0, done.stderr
    claims = {c["id"]: c for c in json.loads(done.stdout)}
    assert claims["dsn.encoder_layers_of_base"]["status"] == "inconsistent"
    assert claims["perforated.glue.QQP.base"]["status"] == "cannot be run here"
    assert claims["perforated.glue.CoLA.base"]["status"] == "measured elsewhere"
    for claim in claims.values(): assert bool(claim["measured"]) == (claim["run"] is not None)


def test_data_status_says_why_a_source_is_not_there(lab, root, tmp_path):
    done = lab(root, "data", "status", HF_HUB_OFFLINE="1")
    assert done.returncode == 0 and "DENDRITIC_LAB_DATA is not set" in done.stdout and "HF_HUB_OFFLINE" in done.stdout
    done = lab(root, "data", "status", DENDRITIC_LAB_DATA=str(tmp_path / "gone"))
    assert done.returncode == 0 and "is not a folder" in done.stdout
    words = ["run", "dsn", "--profile", "smoke", "--data", "auto", "--out", str(tmp_path)]
    done = lab(root, *words, DENDRITIC_LAB_DATA=str(tmp_path / "gone"))
    assert done.returncode == 1 and "is not a folder" in done.stderr


def test_doctor_finds_this_environment_fit(lab, root):
    done = lab(root, "doctor")
    assert done.returncode == 0 and "broken" not in done.stdout and "torchvision" in done.stdout, done.stdout


def test_data_that_cannot_be_had_fail_the_run(lab, root, tmp_path):
    done = lab(root, "run", "dsn", "--profile", "smoke", "--data", "local", "--out", str(tmp_path))
    assert done.returncode == 1 and "DENDRITIC_LAB_DATA is not set" in done.stderr and "Three ways" in done.stderr


def test_claims_begin_with_the_ledger_in_one_sentence_and_can_be_filtered(ask, root):
    done = ask(root, "claims", "--system", "dsn", "--status", "inconsistent")
    first = done.stdout.splitlines()[0]
    measured = re.match(r"\d+ of \d+ measured claims reproduced|No claim has been measured directly yet; of \d+: ",
                        first)
    assert done.exit_code == 0 and measured, done.output
    assert "dsn.encoder_layers_of_base" in done.stdout and "dsn.accuracy" not in done.stdout
    assert "perforated.overall_sparsity" not in done.stdout
