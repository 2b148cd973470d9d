"""Runs are complete or visibly failed, and the exit code says which."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import yaml

from conftest import COMMAND, record_by_hand

ROOT = Path(__file__).resolve().parents[1]


def only_run(checkout: Path) -> Path:
    folders = list((checkout / "outputs/tiny").iterdir())
    assert len(folders) == 1
    return folders[0]


def test_a_complete_run_has_all_its_files(make_checkout, lab, record):
    checkout = make_checkout(record)
    done = lab(checkout, "run", "tiny", "-p", "times=4")
    assert done.returncode == 0, done.stderr
    run = only_run(checkout)
    assert {p.name for p in run.iterdir()} == {
        "report.ipynb", "report.html", "metrics.json", "params.yaml", "environment.json", "figures", "kernel.log",
        "status"}
    assert (run / "status").read_text() == "complete\n" and "." not in run.name
    effective = {"experiment": "tiny", "profile": "quick", "parameters": {"times": 4}}
    assert yaml.safe_load((run / "params.yaml").read_text()) == effective
    environment = json.loads((run / "environment.json").read_text())
    assert environment["packages"]["torch"] and environment["hardware"]["cores"] and environment["git"] is None
    assert str(run.relative_to(checkout) / "report.html") in done.stdout and "times, count" in done.stdout
    assert str(checkout) not in (run / "report.ipynb").read_text() + (run / "environment.json").read_text()


@pytest.mark.parametrize("experiment, choices", [
    ("dendritic_receptive_fields", ["images=cifar10_grey", "train_rows=200", "test_rows=40"]),
    ("dsn_distilled", ["task=bbc_news", "arms=pieces,leaky_attention"]),
    ("grown_arithmetic", ["task=differences"])], ids=lambda of: of if isinstance(of, str) else of[0])
def test_what_the_smoke_profiles_leave_out_runs_too(lab, tmp_path, experiment, choices):
    words = [word for choice in choices for word in ("-p", choice)]
    done = lab(ROOT, "run", experiment, "--profile", "smoke", *words, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr


PICTURE = """from IPython.display import HTML, display
display(HTML('<img src=\"https://a.example/x.png\">'))
@RECORD@"""
WRITE = "import os, pathlib; pathlib.Path(os.environ['DENDRITIC_LAB_RUN'], 'metrics.json').write_text('{}')"
FAILURES = {
    "a picture from elsewhere": ([PICTURE], "the page would load from elsewhere", None),
    "raises": (["1 / 0"], "ZeroDivisionError: division by zero", 3),
    "leaves early": (["import sys; sys.exit(0)", "times"], "SystemExit: 0", 3),
    "kernel dies": (["import os; os._exit(1)"], "the kernel died", 3),
    "no metrics": (["times"], "wrote no metrics.json", None),
    "metrics of another shape": ([WRITE.replace("{}", '{"schema": 2}')], "does not fit the schema", None),
    "metrics with NaN": ([WRITE.replace("{}", '{"schema": NaN}')], "NaN is not a number", None),
}


@pytest.mark.parametrize("cells, message, cell", FAILURES.values(), ids=FAILURES)
def test_a_failed_run_exits_1_and_says_where(make_checkout, lab, record, cells, message, cell):
    checkout = make_checkout(*(c.replace("@RECORD@", record) for c in cells))
    done = lab(checkout, "run", "tiny")
    run = only_run(checkout)
    assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert str(checkout) not in (run / "report.ipynb").read_text()
    assert run.suffix == ".failed" and (run / "status").read_text() == "failed\n" and (run / "report.ipynb").exists()
    told = (run / "report.html").read_text() if "elsewhere" not in message else "This run failed"
    assert "This run failed" in told and (message in told or "elsewhere" in message)
    if cell: assert f"in cell {cell}:" in done.stderr and str(run / "report.ipynb") in done.stderr


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


SIGNALS = {"signal to the process": (signal.SIGINT, False), "Ctrl-C in a terminal": (signal.SIGINT, True),
           "kill": (signal.SIGTERM, False)}


@pytest.mark.parametrize("number, to_group", SIGNALS.values(), ids=SIGNALS)
def test_an_interrupt_leaves_a_failed_run_and_no_kernel(make_checkout, number, to_group):
    checkout = make_checkout("import pathlib, time\npathlib.Path('here').touch()\ntime.sleep(600)")
    process = subprocess.Popen([*COMMAND, "run", "tiny"], cwd=checkout, stderr=subprocess.PIPE, text=True,
                               start_new_session=True)
    for _ in range(600):
        if list(checkout.glob("outputs/tiny/*/here")): break
        time.sleep(0.1)
    kernels = descendants(process.pid)
    assert kernels
    os.killpg(process.pid, number) if to_group else process.send_signal(number)
    _, message = process.communicate(timeout=600)
    assert process.returncode == 130 and "interrupted" in message
    assert (only_run(checkout) / "status").read_text() == "failed\n"
    assert not psutil.wait_procs(kernels, timeout=60)[1]


REFUSED = {
    "unknown experiment": (["run", "tinny"], "did you mean 'tiny'"),
    "unknown profile": (["run", "tiny", "--profile", "quik"], "did you mean 'quick'"),
    "unknown parameter": (["run", "tiny", "-p", "tims=2"], "did you mean 'times'"),
    "wrong type": (["run", "tiny", "-p", "times=two"], "expected a whole number, got 'two'"),
    "an octal": (["run", "tiny", "-p", "times=0o3"], "expected a whole number"),
    "a fraction": (["run", "tiny", "-p", "times=1.5"], "expected a whole number"),
    "too large": (["run", "tiny", "-p", "times=6"], "expected a value from 1 to 5"),
    "no value": (["run", "tiny", "-p", "times"], "expects name=value"),
    "twice": (["run", "tiny", "-p", "times=1", "-p", "times=2"], "given twice"),
    "data of an experiment without": (["run", "tiny", "--data", "local"], "no parameter 'data'"),
    "code as a value": (["run", "tiny", "-p", "times=__import__('os')"], "expected a whole number"),
    "a path as a name": (["run", "../tiny"], "no experiment"),
    "an option that does not exist": (["run", "tiny", "--profil", "quick"], "No such option"),
    "no experiment": (["run"], "Missing argument"),
}


@pytest.mark.parametrize("words, message", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_with_2_before_anything_starts(make_checkout, ask, words, message):
    checkout = make_checkout("times")
    done = ask(checkout, *words)
    assert done.exit_code == 2 and message in done.stderr, done.output
    assert not (checkout / "outputs").exists()


PROFILES = {
    "wrong type": ("quick: {times: many}", "expected a whole number"),
    "not YAML": ("quick: {times: [", "not valid YAML"),
    "no body": ("quick:", "expected profiles"), "a list": ("- quick", "expected profiles")}


@pytest.mark.parametrize("profiles, message", PROFILES.values(), ids=PROFILES)
def test_profiles_with_mistakes_are_refused(make_checkout, ask, profiles, message):
    done = ask(make_checkout("times", profiles=profiles), "run", "tiny")
    assert done.exit_code == 2 and message in done.stderr, done.output


CELLS = {
    "not Python": ("times: int = ", "is not Python"), "no type": ("times = 2", "expected `name: type"),
    "not a literal": ("times: int = 1 + x  # how often", "must be a literal"),
    "another kind of limit": ("times: int = 2  # how often; b", "expected low..high"),
    "a default out of range": ("times: int = 9  # how often; 1..5", "from 1 to 5")}


@pytest.mark.parametrize("cell, message", CELLS.values(), ids=CELLS)
def test_parameters_cells_with_mistakes_are_refused(make_checkout, ask, cell, message):
    done = ask(make_checkout("1", parameters=cell), "run", "tiny")
    assert done.exit_code == 2 and message in done.stderr, done.output


def test_outside_a_checkout_the_package_s_own_is_used_and_text_stays_data(make_checkout, lab):
    checkout = make_checkout(record_by_hand("tiny.length", "len(text)"),
                             parameters='text: str = "a"  # any text', profiles="quick: {}")
    hostile = "'''\"\"\"; import os; os._exit(3) #\n{x}\\"
    done = lab(checkout, "run", "tiny", "-p", f"text={hostile}")
    assert done.returncode == 0, done.stderr
    assert json.loads((only_run(checkout) / "metrics.json").read_text())["metrics"][0]["value"] == len(hostile)


def test_two_runs_at_once_get_two_folders(make_checkout, record):
    checkout = make_checkout(record)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    both = [subprocess.Popen([*COMMAND, "run", "tiny"], cwd=checkout, **pipes) for _ in range(2)]
    assert [p.wait(120) for p in both] == [0, 0]
    for p in both: p.communicate()
    assert len(list((checkout / "outputs/tiny").iterdir())) == 2


def test_an_unwritable_folder_is_one_line(make_checkout, lab, tmp_path):
    blocked = tmp_path / "a file"
    blocked.touch()
    done = lab(make_checkout("times"), "run", "tiny", "--out", str(blocked))
    assert done.returncode == 2 and f"cannot write to {blocked}" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_is_a_failed_run_in_one_line(make_checkout, lab, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", small]
    if subprocess.run(mount, capture_output=True).returncode: pytest.skip("cannot mount a small file system here")
    try:
        done = lab(make_checkout("print('x' * 2_000_000)"), "run", "tiny", "--out", str(small))
        left = list((small / "tiny").iterdir())
    finally: subprocess.run(["umount", "-l", small], check=True)
    assert done.returncode == 1 and "No space left" in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert [p.suffix for p in left] == [".failed"]
