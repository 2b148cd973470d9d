"""Batches survive what can happen to them: nothing lost, nothing done twice, nothing left over."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import yaml

from conftest import COMMAND, record_by_hand
from dendritic_lab.fleet.account import Journal
from dendritic_lab.fleet.checked_yaml import read_yaml
from dendritic_lab.fleet.cluster import unpack, work_anywhere
from dendritic_lab.fleet.driver import Driver, open_batch
from dendritic_lab.fleet.engine import Resources
from dendritic_lab.fleet.local import LocalEngine
from dendritic_lab.fleet.plan import read_plan
from dendritic_lab.fleet.recovery import FinishedRuns, run_lock
from dendritic_lab.lab.experiments import UsageError

RECORD = record_by_hand("tiny.seed", "seed")
PARAMETERS = """seed: int = 0  # of what is random; 0..1000
data: str = "embedded"  # where data come from; embedded|local"""
SLOW = "import pathlib, time\npathlib.Path('here').touch()\ntime.sleep(600)"


@pytest.fixture
def checkout(make_checkout):
    "A checkout with an experiment `tiny` that takes a seed, and a batch file `many.yaml`."
    def make(*cells: str, file: str = "experiments: tiny\nprofiles: smoke\nseeds: 2\n") -> Path:
        made = make_checkout(*cells, RECORD, parameters=PARAMETERS, profiles="quick: {seed: 7}\n")
        (made / "many.yaml").write_text(file)
        return made
    return make


@pytest.fixture
def start():
    "Start the command line in a folder without waiting for it; what is left at the end is killed."
    started = []
    def run(folder: Path, *words: str, **environment: str) -> subprocess.Popen:
        variables = {k: v for k, v in os.environ.items() if k != "DENDRITIC_LAB_DATA"} | environment
        started.append(subprocess.Popen([*COMMAND, *words], cwd=folder, env=variables, stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT, text=True, start_new_session=True))
        return started[-1]
    yield run
    for process in started:
        if process.poll() is None: process.kill()
        process.communicate()


def runs(checkout: Path, suffix: str = "") -> list[Path]:
    return sorted(p for p in (checkout / "outputs/tiny").glob("*") if p.suffix == suffix)


def seeds_of(folders: list[Path]) -> list[int]:
    return sorted(yaml.safe_load((f / "params.yaml").read_text())["parameters"]["seed"] for f in folders)


def wait_for(condition, seconds: float = 120):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if (found := condition()): return found
        time.sleep(0.1)
    raise AssertionError("it did not happen in time")


def at_work_in(checkout: Path) -> list[psutil.Process]:
    "Processes whose run lies in the checkout."
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("DENDRITIC_LAB_RUN", "").startswith(str(checkout)): found.append(process)
        except psutil.Error: pass
    return found


def clean(checkout: Path) -> bool:
    "No process is left, no run looks as if it were running, and there are no temporary files."
    for pattern in ("*/*.running", "**/*.new", "**/*-runtime", "*/.arriving-*"):
        assert list((checkout / "outputs").glob(pattern)) == []
    wait_for(lambda: not at_work_in(checkout), 10)
    return True


def test_a_failure_stops_no_other_run_and_is_kept(checkout, lab):
    made = checkout("assert seed != 1, 'no luck'", file="experiments: tiny\nprofiles: smoke\nseeds: 3\n")
    dry = lab(made, "batch", "many.yaml", "--dry-run")
    assert dry.returncode == 0 and dry.stdout.count("to run") == 3 and not (made / "outputs").exists()
    done = lab(made, "batch", "many.yaml", "--retry", "1", "--workers", "1")
    assert done.returncode == 1 and "2 done, 1 failed" in done.stdout, done.stdout + done.stderr
    assert "cell 3: AssertionError: no luck" in done.stdout
    assert seeds_of(runs(made)) == [0, 2] and seeds_of(runs(made, ".failed")) == [1, 1]
    assert [json.loads((f / "identity.json").read_text())["attempt"] for f in runs(made, ".failed")] == [1, 2]
    assert clean(made)

    refused = lab(made, "batch", "many.yaml")
    assert refused.returncode == 2 and "--resume runs what is missing" in refused.stderr
    (runs(made)[0] / "metrics.json").write_text('{"schema": 2, "metr')   # cut off
    (runs(made)[1] / "params.yaml").write_text("parameters: {seed: 5}\n")   # not what was run
    again = lab(made, "batch", "many.yaml", "--resume", "--workers", "1")
    assert again.stdout.count("  damaged  ") == 2
    assert "metrics.json is damaged" in again.stdout and "params.yaml does not hold" in again.stdout
    assert "2 done, 1 failed" in again.stdout and len(runs(made)) == 4


def test_finished_runs_are_not_repeated_unless_the_data_changed(checkout, lab, tmp_path):
    made = checkout(file="experiments: tiny\nprofiles: smoke\nparameters: {data: local}\n")
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.tsv").write_text("a\t1\n")
    first, second = (lab(made, "batch", "many.yaml", DENDRITIC_LAB_DATA=str(data)) for _ in range(2))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr
    assert "1 done" in first.stdout and "1 reused" in second.stdout
    (data / "train.tsv").write_text("b\t1\n")
    third = lab(made, "batch", "many.yaml", DENDRITIC_LAB_DATA=str(data))
    assert "1 done" in third.stdout and len(runs(made)) == 2


def test_the_driver_is_killed_and_the_batch_goes_on(checkout, lab, start):
    made = checkout("""import pathlib, time
while not pathlib.Path('../../../go').exists(): pathlib.Path('here').touch(); time.sleep(0.1)""")
    process = start(made, "batch", "many.yaml", "--workers", "1")
    wait_for(lambda: list(made.glob("outputs/tiny/*/here")))
    process.kill()
    process.wait()
    wait_for(lambda: not at_work_in(made), 30)
    (made / "go").touch()
    done = lab(made, "batch", "many.yaml", "--resume", "--workers", "1")
    assert done.returncode == 0 and "2 done" in done.stdout, done.stdout + done.stderr
    assert seeds_of(runs(made)) == [0, 1] and len(runs(made, ".failed")) == 1 and clean(made)


@pytest.mark.parametrize("victim, reason", [("worker", "ended by SIGKILL"), ("kernel", "the kernel died")])
def test_a_killed_worker_or_kernel_fails_one_run(checkout, start, victim, reason):
    made = checkout("""import os, pathlib, time
if seed == 0: pathlib.Path('pids').write_text(f'{os.getppid()} {os.getpid()}'); time.sleep(600)""")
    process = start(made, "batch", "many.yaml", "--workers", "1")
    pids = wait_for(lambda: [p.read_text().split() for p in made.glob("outputs/tiny/*/pids") if p.read_text()])[0]
    os.kill(int(pids[victim == "kernel"]), signal.SIGKILL)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 1 and reason in output and "1 done, 1 failed" in output, output
    assert seeds_of(runs(made)) == [1] and seeds_of(runs(made, ".failed")) == [0] and clean(made)


@pytest.mark.parametrize("number, to_group", [(signal.SIGINT, True), (signal.SIGTERM, False)], ids=["Ctrl-C", "kill"])
def test_an_interrupt_ends_every_run_and_says_how_to_go_on(checkout, start, number, to_group):
    made = checkout(SLOW)
    process = start(made, "batch", "many.yaml", "--workers", "2")
    wait_for(lambda: len(list(made.glob("outputs/tiny/*/here"))) == 2)
    os.killpg(process.pid, number) if to_group else process.send_signal(number)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 130 and "--resume" in output and "Traceback" not in output, output
    assert [(f / "status").read_text() for f in runs(made, ".failed")] == ["failed\n"] * 2 and clean(made)


@contextmanager
def small_disk(folder: Path):
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", folder]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("cannot mount a small file system here")
    try: yield folder
    finally: subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_fails_the_run_that_fills_it(checkout, lab, tmp_path):
    made = checkout("if seed == 0: print('x' * 2_000_000)")
    with small_disk(tmp_path / "small") as small:
        done = lab(made, "batch", "many.yaml", "--workers", "1", "--out", str(small))
        names = [p.suffix for p in (small / "tiny").iterdir()]
    said = done.stdout + done.stderr
    assert done.returncode == 1 and "No space left" in done.stdout and "Traceback" not in said, said
    assert ".running" not in names and ".failed" in names


def test_an_output_folder_that_vanishes_fails_the_run_in_it(checkout, start):
    made = checkout("""import os, pathlib, shutil
if seed == 0: shutil.rmtree(pathlib.Path(os.environ['DENDRITIC_LAB_RUN']).parents[1])""")
    process = start(made, "batch", "many.yaml", "--workers", "1")
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 1 and "1 done, 1 failed" in output and "Traceback" not in output, output
    assert seeds_of(runs(made)) == [1] and clean(made)


def test_two_batches_on_one_folder_share_the_work(checkout, start, lab):
    made = checkout("import time; time.sleep(1)")
    (made / "other.yaml").write_text("experiments: tiny\nprofiles: smoke\nlist: [{seed: 1}, {seed: 0}, {seed: 3}]\n")
    first, second = (start(made, "batch", name, "--workers", "1") for name in ("many.yaml", "other.yaml"))
    wait_for(lambda: any(made.glob("outputs/batches/many-*/plan.json")))
    same = lab(made, "batch", "many.yaml", "--resume")
    outputs = [p.communicate(timeout=600)[0] for p in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], outputs
    assert same.returncode == 2 and "being run by another process" in same.stderr, same.stderr
    assert seeds_of(runs(made)) == [0, 1, 3] and clean(made)   # none of them twice


def test_a_clock_that_jumps_changes_no_duration(checkout, tmp_path):
    made = checkout()
    code = """import itertools, time, dendritic_lab.fleet.driver
jumping = itertools.cycle([1e9, 2e9, 0.0])
time.time = lambda: next(jumping)
from dendritic_lab.cli import main
main()"""
    command = [sys.executable, "-c", code, "batch", "many.yaml", "--workers", "1"]
    done = subprocess.run(command, cwd=made, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "2 done" in done.stdout, done.stdout + done.stderr
    for unit in (" h ", " -1 s"): assert unit not in done.stdout


STAND_IN = """
import json, os, pathlib, random, sys
from dendritic_lab.lab.runs import Run
for line in sys.stdin:
    r = json.loads(line)
    seed = r["parameters"]["seed"]
    folder = pathlib.Path(r["out"], "tiny", f"{seed}-{r['attempt']}.running")
    folder.mkdir(parents=True)
    (folder / "identity.json").write_text(json.dumps({k: r[k] for k in ("identity", "batch", "attempt")}))
    say = lambda event, **rest: print(json.dumps({"key": r["key"], "event": event, **rest}), flush=True)
    say("started", folder=str(folder))
    run, luck = Run(folder), random.Random(f"{seed} {r['attempt']}").random()
    if luck < 0.05: os.kill(os.getpid(), 9)
    elif luck < 0.10: say("failed", reason="no luck", folder=str(run.fail()), cell=1)
    else: say("done", folder=str(run.complete()))
"""


def test_200_runs_with_failures_lose_and_repeat_nothing(checkout, tmp_path):
    made = checkout(file="experiments: tiny\nprofiles: smoke\nseeds: 200\n")
    planned, out, told = read_plan(made / "many.yaml", made), tmp_path / "out", []
    folder, lock = open_batch(planned, out, resume=False)
    with lock, LocalEngine(4, folder / "workers.log", (sys.executable, "-c", STAND_IN), gpus=[]) as engine:
        show = lambda account, event, rest: told.append((account.run.identity, event))
        driver = Driver(planned, engine, out, 5, Journal(folder / "events.jsonl"), show)
        driver.prepare()
        driver.go()
        children = psutil.Process().children()
    assert {a.status for a in driver.accounts.values()} == {"done"} and len(driver.accounts) == 200
    failures = sum(len(a.failures) for a in driver.accounts.values())
    assert 10 <= failures <= 40 and any("SIGKILL" in f["reason"] for a in driver.accounts.values() for f in a.failures)
    assert sorted(i for i, event in told if event == "done") == sorted(driver.accounts)   # each once
    names = [p.suffix for p in (out / "tiny").iterdir()]
    assert (names.count(""), names.count(".failed"), names.count(".running")) == (200, failures, 0)
    journal = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert sum(e["event"] == "done" for e in journal) == 200
    assert sum(e["event"] == "failed" for e in journal) == failures
    assert not [p for p in children if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert {p.name for p in folder.iterdir()} == {"lock", "plan.json", "batch.yaml", "events.jsonl", "workers.log"}


def test_a_lock_goes_with_the_process_that_held_it(tmp_path):
    code = f"""import time
from dendritic_lab.fleet.recovery import run_lock
with run_lock({str(tmp_path)!r}, 'a' * 64) as free: print(free, flush=True); time.sleep(600)"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "True\n"
    with run_lock(tmp_path, "a" * 64) as free, run_lock(tmp_path, "b" * 64) as other:
        assert (free, other) == (False, True)
    process.kill()
    process.communicate()
    with run_lock(tmp_path, "a" * 64) as free: assert free


def test_gpus_are_divided(tmp_path):
    code = """import json, os, sys
for line in sys.stdin:
    seen = os.environ['CUDA_VISIBLE_DEVICES'] + ' ' + os.environ['OMP_NUM_THREADS']
    open(sys.argv[1] + json.loads(line)['key'], 'w').write(seen)"""
    files = [tmp_path / f"run{key}" for key in "abce"]
    command = (sys.executable, "-c", code, str(tmp_path / "run"))
    with LocalEngine(4, tmp_path / "log", command, gpus=["4", "6"]) as engine:
        engine.cores = 8
        shares = {"a": 0.5, "b": 0.5, "c": 1, "d": 1}
        started = [engine.submit({"key": key}, Resources(gpus=share)) for key, share in shares.items()]
        assert started == [True, True, True, False]
        assert engine.submit({"key": "e"}, Resources(cpus=1, gpus=0))
        seen = wait_for(lambda: all(p.exists() and p.read_text() for p in files) and [p.read_text() for p in files])
        assert engine.refusal(Resources(gpus=3)) and engine.refusal(Resources(cpus=9))
        assert not engine.refusal(Resources(cpus=8, gpus=2))
    assert seen == ["4 2", "4 2", "6 2", " 1"]


def request_for(made: Path, out: Path) -> dict:
    run = read_plan(made / "many.yaml", made).runs[0]
    return {"key": run.identity, "notebook": str(run.experiment.notebook), "profile": run.profile,
            "parameters": run.parameters, "out": str(out), "identity": run.identity, "batch": "many", "attempt": 1}


def test_a_run_comes_back_from_a_machine_without_the_folder(checkout, tmp_path):
    made = checkout()
    request = request_for(made, tmp_path / "out")
    last = work_anywhere(request, "nbs/experiments/tiny.ipynb", 1, "token", str(tmp_path / "not there"))
    assert last["event"] == "done" and not (tmp_path / "out").exists(), last
    here = unpack(last, tmp_path / "out")
    run = read_plan(made / "many.yaml", made).runs[0]
    found = FinishedRuns(tmp_path / "out").find("tiny", run.identity, run.parameters)
    assert found == Path(here["folder"])
    assert [p.name for p in (tmp_path / "out/tiny").iterdir()] == [found.name]


def test_ray_gives_the_same_runs(checkout, lab):
    pytest.importorskip("ray")
    made = checkout("assert seed != 1, 'no luck'")
    # On a slow core Ray's processes take half a minute to start.
    done = lab(made, "batch", "many.yaml", "--engine", "ray", timeout=400)
    if "timed out during startup" in done.stderr:
        pytest.skip("Ray did not start within its half minute on this machine")
    assert done.returncode == 1 and "1 done, 1 failed" in done.stdout, done.stdout + done.stderr
    assert "no luck" in done.stdout
    assert seeds_of(runs(made)) == [0] and seeds_of(runs(made, ".failed")) == [1] and clean(made)


HOSTILE = ["'; import os; os._exit(3) #\n\"\"\"\n__import__('os')._exit(3)\n{0}\\\n{x}\u202e\U0001f9e0",
           "../../x<script>alert(1)</script>"]


def test_parameters_reach_the_notebook_as_data_and_the_report_as_text(make_checkout, lab):
    show = "import pandas as pd\ndisplay(pd.DataFrame({'text': [text]}))\nlen(text)"
    made = make_checkout(show, record_by_hand("tiny.length", "len(text)"),
                         parameters='text: str = "a"  # any', profiles="quick: {}\n")
    (made / "many.yaml").write_text(yaml.safe_dump({"experiments": "tiny", "grid": {"text": HOSTILE}}))
    done = lab(made, "batch", "many.yaml", "--workers", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    found = {yaml.safe_load((f / "params.yaml").read_text())["parameters"]["text"]: f for f in runs(made)}
    assert found.keys() == set(HOSTILE)
    for text, folder in found.items():
        assert json.loads((folder / "metrics.json").read_text())["metrics"][0]["value"] == len(text)
    page = (found[HOSTILE[1]] / "report.html").read_text()
    assert "&lt;script&gt;alert(1)" in page and "<script>alert" not in page


def test_a_notebook_from_elsewhere_needs_a_flag(checkout, lab, tmp_path):
    made = checkout()
    outside = tmp_path / "outside.ipynb"
    outside.write_text((made / "nbs/experiments/tiny.ipynb").read_text())
    (made / "nbs/experiments/linked.ipynb").symlink_to(outside)
    (made / "many.yaml").write_text("experiments: linked\nprofiles: smoke\n")
    for words in (["run", str(outside)], ["run", "linked"], ["batch", "many.yaml"]):
        assert lab(made, *words).returncode == 2
    assert "--trust" in lab(made, "run", "linked").stderr and not (made / "outputs").exists()
    done = lab(made, "run", str(outside), "--trust", "--profile", "smoke")
    assert done.returncode == 0 and len(list((made / "outputs/outside").iterdir())) == 1, done.stderr


def test_nothing_is_loaded_unsafely(root):
    source = "\n".join(p.read_text() for p in (root / "dendritic_lab").rglob("*.py"))
    for word in ("pickle.load(", "pickle.dump(", "joblib.load", "allow_pickle=True", "yaml.load(", "weights_only=False",
                 "shell=True"): assert word not in source


def test_a_yaml_bomb_is_refused_at_once(tmp_path):
    letters = [chr(97 + i) for i in range(21)]
    doubled = [f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip(letters, letters[1:])]
    (tmp_path / "bomb.yaml").write_text("a: &a [x, x]\n" + "".join(doubled))
    with pytest.raises(UsageError, match="line 2: expected no alias"): read_yaml(tmp_path / "bomb.yaml")


def test_the_slurm_recipe_is_valid_shell(root):
    recipe = root / "dendritic_lab/fleet/slurm/ray_batch.sh"
    assert os.access(recipe, os.X_OK) and subprocess.run(["bash", "-n", recipe], capture_output=True).returncode == 0
