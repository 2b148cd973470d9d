"""Models that people take away: from a run to a folder that transformers loads, and those inside the package."""

import shutil
from pathlib import Path

import pytest
import torch

from dendritic_lab.data.sources import CHECKPOINTS, checkpoint_path, own_checkpoints
from dendritic_lab.models.dsn import DSNForSequenceClassification

from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline  # after dendritic_lab: torchvision

KEEPS = """from dendritic_lab.lab.record import Recorder
from dendritic_lab.models.dsn import DSNForSequenceClassification
from dendritic_lab.models.dsn_arms import cut_encoder
recorder = Recorder('tiny')
dsn = DSNForSequenceClassification.from_encoder(
    "all-MiniLM-L6-v2", vocab_size=300, embedding_rank=4, texts=["a fine film"], hidden_size=8)
recorder.model("small", dsn, labels=["negative", "positive"], what="A small one.")
recorder.model("large", cut_encoder("all-MiniLM-L6-v2", 1), labels=["negative", "positive"])
recorder.metric("small.times", times, "count")
recorder.conclude("It ran.", limits="It is tiny.")"""


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    "A finished run that kept two models, in a checkout."
    from conftest import made_checkout
    from dendritic_lab.lab.experiments import find_experiment
    from dendritic_lab.lab.runs import run_experiment
    checkout = made_checkout(tmp_path_factory.mktemp("kept"), KEEPS)
    return run_experiment(find_experiment("tiny", checkout), "quick", {"times": 4})


def test_an_exported_model_loads_by_auto_classes_and_pipeline(ask, run, tmp_path):
    folder = tmp_path / "taken"
    folder.mkdir()  # an empty one may be there
    done = ask(run.parents[2], "export", str(run), str(folder), "--arm", "small")
    assert done.exit_code == 0, done.stderr
    model, tokenizer = (kind.from_pretrained(folder) for kind in (AutoModelForSequenceClassification, AutoTokenizer))
    assert type(model) is DSNForSequenceClassification and model.config.label2id == {"negative": 0, "positive": 1}
    logits = model.eval()(**tokenizer("a fine film", return_tensors="pt")).logits
    said = pipeline("text-classification", str(folder))("a fine film", top_k=None)
    positive = next(s["score"] for s in said if s["label"] == "positive")
    assert positive == pytest.approx(logits.softmax(-1)[0, 1].item(), abs=1e-6)


def test_a_plain_encoder_is_exported_too(ask, run, tmp_path):
    assert ask(run.parents[2], "export", str(run), str(tmp_path / "large"), "--arm", "large").exit_code == 0
    said = pipeline("text-classification", str(tmp_path / "large"))("a fine film")
    assert said[0]["label"] in ("negative", "positive")
    assert "import dendritic_lab" not in (tmp_path / "large/README.md").read_text()


def test_the_card_says_what_was_measured_and_how_to_make_it_again(ask, run, tmp_path):
    from huggingface_hub import ModelCard
    ask(run.parents[2], "export", str(run), str(tmp_path / "taken"), "--arm", "small")
    card = ModelCard.load(tmp_path / "taken/README.md")
    assert (card.data.license, card.data.library_name, card.data.pipeline_tag) == (
        "apache-2.0", "transformers", "text-classification")
    for words in ("A small one.", "import dendritic_lab.models.dsn", "| small.times | 4", "It is tiny.",
                  "dendritic-lab run tiny --profile quick -p times=4", "--arm small", "Apache License"):
        assert words in card.text, words


def test_what_cannot_be_exported_is_one_clear_error(ask, run, tmp_path):
    root, full = run.parents[2], tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    without, failed = tmp_path / "without", tmp_path / "20260101-000000-aaaaaa.failed"
    shutil.copytree(run, without, ignore=shutil.ignore_patterns("models"))
    shutil.copytree(without, failed)
    for words, message in [
            ([tmp_path / "lost", "new"], "is not a folder of a run"), ([failed, "new"], "is not complete"),
            ([without, "new"], "kept no model"), ([run, "new", "--arm", "medium"], "--arm can be large, small"),
            ([run, "new"], "--arm can be large, small"), ([run, full, "--arm", "small"], "is not an empty folder"),
            ([run, full / "file", "--arm", "small"], "is not an empty folder")]:
        done = ask(root, "export", *map(str, words))
        assert done.exit_code == 2 and message in done.stderr and done.stderr.count("\n") == 1, (words, done.output)
    assert not (root / "new").exists()


@pytest.mark.parametrize("name", own_checkpoints())
def test_embedded_models_are_small_and_have_cards(name):
    files = {p.name: p for p in (CHECKPOINTS / name).iterdir()}
    assert {"README.md", "config.json", "model.safetensors"} <= files.keys()
    assert sum(p.stat().st_size for p in files.values()) < 3e6
    assert "## Limits" in files["README.md"].read_text() and "dendritic-lab run" in files["README.md"].read_text()


def test_the_embedded_dsn_works_offline_by_its_name():
    model = DSNForSequenceClassification.from_pretrained("dsn-sst2").eval()
    texts = ["a wonderful, moving film", "a dull and pointless mess"]
    with torch.no_grad(): logits = model(**model.tokenizer(texts, padding=True, return_tensors="pt")).logits
    assert logits.argmax(-1).tolist() == [1, 0]
    classify = pipeline("text-classification", checkpoint_path("dsn-sst2"))
    assert [said["label"] for said in classify(texts)] == ["positive", "negative"]
