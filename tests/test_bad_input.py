"""What cannot be is refused with exit code 2 and one clear line, before anything is written."""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from conftest import metrics_json
from dendritic_lab.cli import app

PARAMETERS = """seed: int = 0  # of what is random; 0..1000
lr: float = 0.1  # learning rate; 0..1
text: str = "a"  # any text
kind: str = "plain"  # of model; plain|grown
deep: bool = False  # more layers
sizes: list[int] = [1, 2]  # of layers; 1..9"""


@pytest.fixture
def folder(make_checkout, monkeypatch) -> Path:
    "A checkout with the experiment `tiny`, which would create a file if it ran, and some folders that look like runs."
    touch = "import pathlib\npathlib.Path('ran').touch()"
    made = make_checkout(touch, parameters=PARAMETERS, profiles="quick: {lr: 0.2}\n")
    monkeypatch.chdir(made)
    recorded = lambda experiment, **parameters: {
        "params.yaml": yaml.safe_dump({"experiment": experiment, "profile": "quick", "parameters": parameters})}
    good = recorded("tiny", seed=0) | {
        "environment.json": json.dumps({"hardware": {"threads": 1}}), "status": "complete\n",
        "metrics.json": json.dumps(metrics_json("a", 1))}
    changes = {
        "good": {}, "same": {}, "failed.failed": {}, "empty": dict.fromkeys(good), "no_metrics": {"metrics.json": None},
        "cut_metrics": {"metrics.json": '{"schema": 2'}, "nan_metrics": {"metrics.json": '{"schema": NaN}'},
        "cut_params": {"params.yaml": "{a: [1"}, "list_params": {"params.yaml": "[1, 2]"},
        "code_params": {"params.yaml": "!!python/object/apply:os.system [touch ran]"},
        "binary_params": {"params.yaml": b"\xff\xfe\x00"}, "cut_environment": {"environment.json": "{"},
        "list_environment": {"environment.json": "[]"}, "other": recorded("gone"), "beyond": recorded("../tiny"),
        "old": recorded("tiny", gone=1)}
    for name, changed in changes.items():
        (made / "runs/tiny" / name).mkdir(parents=True)
        for file, content in {**good, **changed}.items():
            if content is None: continue
            content = content if isinstance(content, bytes) else content.encode()
            (made / "runs/tiny" / name / file).write_bytes(content)
    (made / "file").touch()
    (made / "good.yaml").write_text("experiments: tiny\nprofiles: smoke\n")
    (made / "sweep.yaml").write_text("experiment: tiny\nmetric: a\nsearch: {lr: {low: 0.1, high: 0.2}}\n")
    (made / "runs/batches/broken-00000000").mkdir(parents=True)
    (made / "runs/batches/broken-00000000/plan.json").write_text('{"runs": [{}]}')
    return made


def snapshot(folder: Path) -> set[Path]:
    return {p.relative_to(folder) for p in folder.rglob("*") if "__pycache__" not in p.parts}


def refuse(folder: Path, words: list[str], message: str):
    before = snapshot(folder)
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2, (done.exit_code, done.output, done.exception)
    assert message in done.output, done.output
    assert "Traceback" not in done.output
    if "Usage:" not in done.output: assert len(done.output.strip().splitlines()) == 1, done.output
    assert snapshot(folder) == before


COMMANDS = {
    "no such command": (["rum", "tiny"], "No such command"),
    "run: unknown experiment": (["run", "tinny"], "did you mean 'tiny'"),
    "run: an empty name": (["run", ""], "no experiment"),
    "run: a path": (["run", "../tiny"], "no experiment"),
    "run: a notebook from elsewhere": (["run", "/elsewhere/tiny.ipynb"], "no experiment"),
    "run: a notebook that is not there": (["run", "gone.ipynb", "--trust"], "is not a readable notebook"),
    "run: a file that is no notebook": (["run", "file", "--trust"], "is not a readable notebook"),
    "run: a null byte": (["run", "a\0b"], "no experiment"),
    "run: unknown profile": (["run", "tiny", "--profile", "fulll"], "no profile"),
    "run: unknown parameter": (["run", "tiny", "-p", "sed=1"], "did you mean 'seed'"),
    "run: text for a number": (["run", "tiny", "-p", "seed=one"], "expected a whole number"),
    "run: NaN": (["run", "tiny", "-p", "lr=nan"], "expected a number"),
    "run: infinity": (["run", "tiny", "-p", "lr=inf"], "expected a number"),
    "run: huge": (["run", "tiny", "-p", "seed=" + "9" * 30], "from 0 to 1000"),
    "run: negative": (["run", "tiny", "-p", "seed=-1"], "from 0 to 1000"),
    "run: empty number": (["run", "tiny", "-p", "seed="], "expected a whole number"),
    "run: not a truth value": (["run", "tiny", "-p", "deep=yes"], "expected true or false"),
    "run: not among the choices": (["run", "tiny", "-p", "kind=odd"], "one of plain, grown"),
    "run: an item of a list": (["run", "tiny", "-p", "sizes=1,x"], "expected a whole number"),
    "run: an empty list": (["run", "tiny", "-p", "sizes="], "expected a whole number"),
    "run: no equals sign": (["run", "tiny", "-p", "seed"], "expects name=value"),
    "run: twice": (["run", "tiny", "-p", "seed=1", "-p", "seed=2"], "given twice"),
    "run: code": (["run", "tiny", "-p", "seed=__import__('os').getpid()"], "expected a whole number"),
    "run: data it has not": (["run", "tiny", "--data", "local"], "no parameter 'data'"),
    "run: an unwritable folder": (["run", "tiny", "--out", "file"], "cannot write to file"),
    "batch: no file": (["batch"], "Missing argument"),
    "batch: a missing file": (["batch", "gone.yaml"], "cannot read gone.yaml"),
    "batch: a folder": (["batch", "runs"], "cannot read runs"),
    "batch: unknown engine": (["batch", "good.yaml", "--engine", "slurm"], "expected local or ray"),
    "batch: an address without ray": (["batch", "good.yaml", "--address", "auto"], "--address is for --engine ray"),
    "batch: no workers": (["batch", "good.yaml", "--workers", "0"], "expected 1 to 1024"),
    "batch: workers in words": (["batch", "good.yaml", "--workers", "two"], "Invalid value"),
    "batch: negative retries": (["batch", "good.yaml", "--retry", "-1"], "expected 0 to 100"),
    "batch: unknown tracker": (["batch", "good.yaml", "--tracker", "pen"], "unknown tracker"),
    "batch: nothing to resume": (["batch", "good.yaml", "--resume"], "nothing to resume"),
    "batch: an unwritable folder": (["batch", "good.yaml", "--out", "file"], "cannot write to"),
    "compare: nothing": (["compare"], "expected folders of runs, or --batch"),
    "compare: both": (["compare", "runs/tiny/good", "--batch", "a"], "expected folders of runs, or --batch"),
    "compare: a missing run": (["compare", "gone"], "is not a folder of a run"),
    "compare: a file": (["compare", "file"], "is not a folder of a run"),
    "compare: an empty folder": (["compare", "runs/tiny/empty"], "no readable params.yaml"),
    "compare: a failed run": (["compare", "runs/tiny/failed.failed"], "is not complete"),
    "compare: no metrics": (["compare", "runs/tiny/no_metrics"], "wrote no metrics.json"),
    "compare: metrics cut off": (["compare", "runs/tiny/cut_metrics"], "metrics.json is damaged"),
    "compare: metrics with NaN": (["compare", "runs/tiny/nan_metrics"], "NaN is not a number"),
    "compare: parameters cut off": (["compare", "runs/tiny/cut_params"], "params.yaml is damaged"),
    "compare: parameters of another shape": (["compare", "runs/tiny/list_params"], "does not hold experiment"),
    "compare: parameters that are code": (["compare", "runs/tiny/code_params"], "params.yaml is damaged"),
    "compare: parameters that are no text": (["compare", "runs/tiny/binary_params"], "params.yaml is damaged"),
    "compare: a run twice": (["compare", "runs/tiny/good", "runs/tiny/good"], "given twice"),
    "compare: the same seed twice": (["compare", "runs/tiny/good", "runs/tiny/same"], "the same parameters and seed"),
    "compare: unknown metric": (["compare", "runs/tiny/good", "--metric", "b"], "no metric 'b'"),
    "compare: unknown batch": (["compare", "--batch", "many-00000000", "--out", "runs"], "there is no batch"),
    "compare: a path as a batch": (["compare", "--batch", "../tiny"], "expected an id"),
    "compare: a damaged batch":
        (["compare", "--batch", "broken-00000000", "--out", "runs"], "plan.json of batch broken-00000000 is damaged"),
    "verify: no run": (["verify"], "Missing argument"),
    "verify: a missing run": (["verify", "gone"], "is not a folder of a run"),
    "verify: a failed run": (["verify", "runs/tiny/failed.failed"], "is not complete"),
    "verify: an environment cut off":
        (["verify", "runs/tiny/cut_environment"], "environment.json is missing or damaged"),
    "verify: an environment of another shape":
        (["verify", "runs/tiny/list_environment"], "does not describe an environment"),
    "verify: an experiment that is gone": (["verify", "runs/tiny/other"], "no experiment 'gone'"),
    "verify: an experiment beyond the checkout": (["verify", "runs/tiny/beyond"], "no experiment '../tiny'"),
    "verify: a parameter that is gone": (["verify", "runs/tiny/old"], "no parameter 'gone'"),
    "clean: a missing folder": (["clean", "--out", "gone"], "gone is not a folder"),
    "clean: a file": (["clean", "--out", "file"], "file is not a folder"),
    "clean: an argument": (["clean", "runs"], "unexpected extra argument"),
    "watch: a missing folder": (["watch", "--out", "gone"], "gone is not a folder"),
    "watch: no time": (["watch", "--out", "runs", "--every", "0"], "expected 0.1 to 3600"),
    "watch: NaN": (["watch", "--out", "runs", "--every", "nan"], "expected 0.1 to 3600"),
    "sweep: a missing file": (["sweep", "gone.yaml"], "cannot read gone.yaml"),
    "sweep: no workers": (["sweep", "sweep.yaml", "--workers", "0"], "expected 1 to 1024"),
    "sweep: unknown tracker": (["sweep", "sweep.yaml", "--tracker", "pen"], "unknown tracker"),
    "sweep: an unwritable folder": (["sweep", "sweep.yaml", "--out", "file"], "cannot write to"),
    "list: unknown experiment": (["list", "tinny"], "did you mean 'tiny'"),
    "list: two arguments": (["list", "tiny", "tiny"], "unexpected extra argument"),
    "doctor: an option": (["doctor", "--fix"], "No such option"),
    "claims: an option": (["claims", "--yaml"], "No such option"),
    "claims: unknown system": (["claims", "--system", "dsm"], "--system: expected one of"),
    "claims: unknown status": (["claims", "--status", "true"], "--status: expected one of"),
    "data: no such command": (["data", "steal"], "No such command"),
    "data status: an argument": (["data", "status", "glue"], "unexpected extra argument"),
}


@pytest.mark.parametrize("words, message", COMMANDS.values(), ids=COMMANDS)
def test_commands(folder, words, message):
    refuse(folder, words, message)


BATCHES = {
    "empty": ("", "many.yaml is empty"),
    "only a comment": ("# nothing", "many.yaml is empty"),
    "a word": ("tiny", "line 1: expected a mapping"),
    "an empty list": ("[]", "line 1: expected a mapping"),
    "not YAML": ("experiments: [tiny\nseeds: 2\n", "line 2: not valid YAML"),
    "a tab": ("experiments: tiny\n\tseeds: 2\n", "line 2: not valid YAML"),
    "not text": (b"experiments: \xff\xfe", "not valid YAML"),
    "a null byte": (b"experiments: ti\0ny", "not valid YAML"),
    "two documents": ("experiments: tiny\n---\nexperiments: tiny\n", "line 2: not valid YAML"),
    "an object of Python": ("experiments: !!python/object/apply:os.system [touch ran]", "line 1: not valid YAML"),
    "an alias": ("experiments: &a tiny\nprofiles: *a", "line 2: expected no alias"),
    "nested too deeply": ("experiments: " + "[" * 5000, "line 1: expected at most 20 levels"),
    "a key twice": ("experiments: tiny\nseeds: 2\nseeds: 3", "line 3: 'seeds' is given twice"),
    "too large": ("experiments: tiny\n#" + "x" * 1_000_001, "at most 1,000,000 are read"),
    "unknown key": ("experiments: tiny\nseed: 2", "line 2: expected one of experiments"),
    "no experiments": ("profiles: smoke", "line 1: `experiments` is missing"),
    "experiments empty": ("experiments: []", "line 1: experiments: expected a name"),
    "an experiment that is a number": ("experiments: 3", "line 1: experiments: expected a name"),
    "an experiment twice": ("experiments: [tiny, tiny]", "a name is given twice"),
    "unknown experiment":
        ("profiles: smoke\nexperiments:\n- tiny\n- tinny\n", "line 4: no experiment 'tinny'; did you mean 'tiny'"),
    "a path": ("experiments: ../../tiny", "line 1: no experiment"),
    "unknown profile": ("experiments: tiny\nprofiles: [quick, slow]", "line 2: tiny has no profile 'slow'"),
    "unknown parameter":
        ("experiments: tiny\nparameters:\n  lr: 0.1\n  lrr: 0.1", "line 4: tiny has no parameter 'lrr'"),
    "a parameter of another type":
        ("experiments: tiny\nparameters: {seed: [1]}", "line 2: parameter seed: expected a whole number"),
    "a date": ("experiments: tiny\nparameters: {text: 2026-01-01}", "line 2: parameter text: expected text"),
    "NaN": ("experiments: tiny\nparameters: {lr: .nan}", "line 2: parameter lr: expected a number"),
    "parameters a list": ("experiments: tiny\nparameters: [lr]", "line 2: parameters: expected a mapping"),
    "grid without a list": ("experiments: tiny\ngrid: {lr: 0.1}", "line 2: grid: expected a list of values for lr"),
    "grid with an empty list": ("experiments: tiny\ngrid: {lr: []}", "line 2: grid: expected a list of values for lr"),
    "grid out of range":
        ("experiments: tiny\ngrid:\n  lr:\n  - 0.1\n  - 7\n", "line 5: parameter lr: expected a value from 0 to 1"),
    "grid and parameters": ("experiments: tiny\nparameters: {lr: 0.1}\ngrid: {lr: [0.2]}", "line 3: lr is set twice"),
    "grid and list": ("experiments: tiny\ngrid: {lr: [0.2]}\nlist: [{lr: 0.1}]", "line 3: lr is set twice"),
    "list empty": ("experiments: tiny\nlist: []", "line 2: list: expected a list of mappings"),
    "list of names": ("experiments: tiny\nlist: [lr]", "line 2: list: expected a mapping"),
    "no seeds": ("experiments: tiny\nseeds: 0", "line 2: seeds: expected how many"),
    "a negative seed": ("experiments: tiny\nseeds: [0, -1]", "line 2: seeds: expected how many"),
    "a seed twice": ("experiments: tiny\nseeds: [1, 1]", "line 2: seeds: expected how many"),
    "seeds in words": ("experiments: tiny\nseeds: three", "line 2: seeds: expected how many"),
    "seeds true": ("experiments: tiny\nseeds: true", "line 2: seeds: expected how many"),
    "seed in the grid too": ("experiments: tiny\ngrid: {seed: [1]}\nseeds: 2", "line 3: seed is set twice"),
    "seeds out of range": ("experiments: tiny\nseeds: 2000", "line 2: parameter seed: expected a value from 0 to 1000"),
    "too many runs":
        (f"experiments: tiny\nseeds: 1000\ngrid: {{lr: {[i / 100 for i in range(11)]}}}", "more than 10,000 runs"),
    "resources a number": ("experiments: tiny\nresources: 2", "line 2: resources: expected a mapping"),
    "unknown resource": ("experiments: tiny\nresources: {tpus: 1}", "line 2: resources: expected cpus and gpus"),
    "no cpus": ("experiments: tiny\nresources: {cpus: 0}", "line 2: cpus: expected a whole number"),
    "half a cpu": ("experiments: tiny\nresources: {cpus: 0.5}", "line 2: cpus: expected a whole number"),
    "one and a half gpus": ("experiments: tiny\nresources: {gpus: 1.5}", "line 2: gpus: expected a share"),
    "negative gpus": ("experiments: tiny\nresources: {gpus: -1}", "line 2: gpus: expected a share"),
    "gpus NaN": ("experiments: tiny\nresources: {gpus: .nan}", "line 2: gpus: expected a share"),
}


@pytest.mark.parametrize("text, message", BATCHES.values(), ids=BATCHES)
def test_batch_files(folder, text, message):
    (folder / "many.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    refuse(folder, ["batch", "many.yaml", "--dry-run"], message)
    refuse(folder, ["batch", "many.yaml"], message)


SWEEPS = {
    "empty": ("", "sweep.yaml is empty"),
    "a list": ("- experiment: tiny", "line 1: expected a mapping"),
    "no metric": ("experiment: tiny\nsearch: {lr: [0.1]}", "`metric` is missing"),
    "no search": ("experiment: tiny\nmetric: a", "`search` is missing"),
    "an empty search": ("experiment: tiny\nmetric: a\nsearch: {}", "line 3: search: expected at least one"),
    "unknown experiment": ("experiment: tinny\nmetric: a\nsearch: {lr: [0.1]}", "line 1: no experiment 'tinny'"),
    "unknown profile":
        ("experiment: tiny\nprofile: slow\nmetric: a\nsearch: {lr: [0.1]}", "line 2: tiny has no profile"),
    "unknown parameter": ("experiment: tiny\nmetric: a\nsearch:\n  lrr: [0.1]", "line 4: tiny has no parameter 'lrr'"),
    "an empty choice": ("experiment: tiny\nmetric: a\nsearch: {lr: []}", "line 3: search: expected for lr"),
    "a range without an end":
        ("experiment: tiny\nmetric: a\nsearch: {lr: {low: 0.1}}", "line 3: search: expected for lr"),
    "a range that falls":
        ("experiment: tiny\nmetric: a\nsearch: {lr: {low: 0.2, high: 0.1}}", "line 3: search: expected low below high"),
    "a range beyond what is allowed":
        ("experiment: tiny\nmetric: a\nsearch: {lr: {low: 0.2, high: 3}}",
         "line 3: parameter lr: expected a value from 0 to 1"),
    "a logarithm of zero":
        ("experiment: tiny\nmetric: a\nsearch: {lr: {low: 0, high: 1, log: true}}",
         "line 3: search: expected low below high and above 0"),
    "a range of text":
        ("experiment: tiny\nmetric: a\nsearch: {text: {low: a, high: b}}", "line 3: search: text is no number"),
    "a range of lists":
        ("experiment: tiny\nmetric: a\nsearch: {sizes: [[1], [2]]}", "line 3: search: sizes takes lists"),
    "twice": ("experiment: tiny\nmetric: a\nparameters: {lr: 0.1}\nsearch: {lr: [0.1]}", "line 4: lr is set twice"),
    "a grid of a continuum":
        ("experiment: tiny\nmetric: a\nsampler: grid\nsearch: {lr: {low: 0.1, high: 0.2}}", "line 4: sampler grid"),
    "unknown sampler":
        ("experiment: tiny\nmetric: a\nsampler: luck\nsearch: {lr: [0.1]}", "line 3: sampler: expected tpe"),
    "unknown direction":
        ("experiment: tiny\nmetric: a\ndirection: up\nsearch: {lr: [0.1]}", "line 3: direction: expected maximize"),
    "no trials":
        ("experiment: tiny\nmetric: a\ntrials: 0\nsearch: {lr: [0.1]}", "line 3: trials: expected a whole number"),
    "storage that is a path":
        ("experiment: tiny\nmetric: a\nstorage: ../../x\nsearch: {lr: [0.1]}", "line 3: storage: expected journal"),
    "pruning without a figure":
        ("experiment: tiny\nmetric: a\nprune: median\nsearch: {lr: [0.1]}", "line 3: prune: expected figure"),
}


@pytest.mark.parametrize("text, message", SWEEPS.values(), ids=SWEEPS)
def test_sweep_files(folder, text, message):
    (folder / "sweep.yaml").write_text(text)
    refuse(folder, ["sweep", "sweep.yaml"], message)


def test_more_than_the_machine_has(folder):
    "Known only when the engine has looked; nothing is left of the batch by then."
    (folder / "many.yaml").write_text("experiments: tiny\nresources: {cpus: 4000}\n")
    done = CliRunner().invoke(app, ["batch", "many.yaml"])
    assert done.exit_code == 2 and "4000 cpus are asked for; this machine has" in done.output
    assert not list((folder / "outputs/batches").glob("many-*")) and not (folder / "outputs/tiny").exists()
