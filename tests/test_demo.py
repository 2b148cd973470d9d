"""The demo makes its page of what is finished, and goes on after an interruption."""

import os
import shutil
import signal
import subprocess
import time

import nbformat
import pytest

from conftest import COMMAND, ROOT, record_by_hand

SUMMARY = """folder = pathlib.Path(os.environ["DENDRITIC_LAB_RUN"])
found = {"sentence": f"Number {times} <spun>.", "limits": "One top.", "figure": None, "caption": ""}
_ = (folder / "summary.json").write_text(json.dumps(found))"""
FAIL_ONCE = "import pathlib\nif pathlib.Path({root!r}, 'broken').exists(): raise OSError('the power went')"


@pytest.fixture
def demo(make_checkout):
    "A checkout whose demo has two experiments of seconds; the second fails as long as a file `broken` is there."
    made = make_checkout(record_by_hand("tiny.times", "times"), SUMMARY, profiles="demo: {times: 4}\n")
    folder = made / "nbs/experiments"
    notebook = nbformat.read(folder / "tiny.ipynb", 4)
    notebook.cells.insert(2, nbformat.v4.new_code_cell(FAIL_ONCE.format(root=str(made))))
    notebook.cells[0].source = "# Other: a second one\n\n> Does it run too?"
    nbformat.write(notebook, folder / "other.ipynb")
    shutil.copy(folder / "tiny.yaml", folder / "other.yaml")
    (folder / "demo.batch.yaml").write_text("experiments: [tiny, other]\nprofiles: demo\n")
    return made


def test_demo_goes_on_and_writes_its_page(demo, lab):
    (demo / "broken").touch()
    first = lab(demo, "demo")
    assert first.returncode == 1 and "the power went" in first.stdout
    page = demo / "outputs/demo/index.html"
    assert page.read_text().count("<section>") == 1
    (demo / "broken").unlink()
    second = lab(demo, "demo")
    assert second.returncode == 0, second.stderr
    assert "1 done, 1 reused" in second.stdout and "Other: Number 4 <spun>." in second.stdout
    assert "outputs/demo/index.html" in second.stdout and "next: dendritic-lab list" in second.stdout
    content = page.read_text()
    assert content.count("<section>") == 2 and "Number 4 &lt;spun&gt;." in content
    reports = [demo / "outputs/demo" / link.partition('"')[0] for link in content.split('href="')[2:]]
    assert len(reports) == 2 and all(report.exists() for report in reports)


def test_demo_that_is_interrupted_goes_on_where_it_was(demo, lab):
    notebook = nbformat.read(demo / "nbs/experiments/other.ipynb", 4)
    slow = f"import pathlib, time\nif not pathlib.Path({str(demo / 'quick')!r}).exists(): time.sleep(600)"
    notebook.cells.insert(2, nbformat.v4.new_code_cell(slow))
    nbformat.write(notebook, demo / "nbs/experiments/other.ipynb")
    started = subprocess.Popen([*COMMAND, "demo"], cwd=demo, text=True, start_new_session=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + 120
        finished = lambda: [f for f in (demo / "outputs/tiny").glob("*") if not f.suffix]
        while not finished() and started.poll() is None and time.monotonic() < end: time.sleep(0.1)
        assert finished(), "the first experiment was not finished in time"
        os.killpg(started.pid, signal.SIGINT)  # as Ctrl-C in a terminal
        said, _ = started.communicate(timeout=600)
    finally:
        if started.poll() is None: os.killpg(started.pid, signal.SIGKILL)
    assert started.returncode == 130 and "interrupted; go on with: dendritic-lab demo" in said, said
    (demo / "quick").touch()
    done = lab(demo, "demo")
    assert done.returncode == 0 and "1 done, 1 reused" in done.stdout, done.stdout + done.stderr


def test_demo_is_of_the_experiments_in_the_checkout():
    from dendritic_lab.fleet.plan import read_plan
    from dendritic_lab.lab.reference import experiments_of_record
    runs = read_plan(ROOT / "nbs/experiments/demo.batch.yaml", ROOT).runs
    assert len(runs) == 5 and not {run.experiment.name for run in runs} & experiments_of_record(ROOT).keys()
    assert all(run.parameters.get("data", "embedded") == "embedded" for run in runs)
