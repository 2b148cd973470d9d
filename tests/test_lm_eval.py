"""lm-evaluation-harness, started as a user starts it, gives the figures of our own scoring: local tasks, no network."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from dendritic_lab.data.language import text_tokenizer
from dendritic_lab.evaluate.questions import score
from dendritic_lab.models.dendritic_lm import DendriticLMConfig, DendriticLMForCausalLM

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
COMMAND = [sys.executable, "-c", "from dendritic_lab.evaluate.harness import main; main()"]
CONTEXT = "Question: {question}\nAnswer:"


def task(folder: Path, name: str, rows: list[dict]):
    "A task of the harness: a YAML file, and its questions beside it."
    (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / f"{name}.yaml").write_text(yaml.safe_dump({
        "task": name, "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"validation": str(folder / f"{name}.jsonl")}},
        "output_type": "multiple_choice", "validation_split": "validation", "test_split": None, "training_split": None,
        "doc_to_text": "Question: {{question}}\nAnswer:", "doc_to_target": "label", "doc_to_choice": "choices",
        "metric_list": [{"metric": m, "aggregation": "mean", "higher_is_better": True} for m in ("acc", "acc_norm")]}))


def sums(count: int, choices: int, seed: int) -> list[dict]:
    "Sums with wrong answers of different lengths."
    draw, rows = random.Random(seed), []
    for _ in range(count):
        a, b = draw.randrange(99), draw.randrange(99)
        others = draw.sample(range(200, 999), choices - 1)
        wrong = [str(w) + draw.choice(["", " exactly", " or so, I think"]) for w in others]
        label = draw.randrange(choices)
        rows.append({"question": f"{a} + {b}", "choices": [*wrong[:label], str(a + b), *wrong[label:]], "label": label})
    return rows


def test_the_harness_and_our_scoring_agree(tmp_path):
    tasks, folder = {"two_choices": sums(12, 2, seed=0), "four_choices": sums(14, 4, seed=1)}, tmp_path / "model"
    for name, rows in tasks.items(): task(tmp_path, name, rows)
    tokenizer = text_tokenizer("characters")
    torch.manual_seed(0)
    model = DendriticLMForCausalLM(DendriticLMConfig.preset("ablation-a", vocab_size=len(tokenizer))).eval()
    with torch.no_grad():  # a new model is nearly uniform, and rounding would decide
        for p in model.parameters(): p.add_(torch.randn_like(p) * 0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    words = ["run", "--model", "dendritic_lm", "--model_args", f"pretrained={folder},dtype=float32",
             "--tasks", ",".join(tasks), "--include_path", str(tmp_path), "--device", "cpu", "--batch_size", "8",
             "--output_path", str(tmp_path / "out"), "--log_samples"]
    quiet = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache"),
             "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=240, cwd=tmp_path,
                          env=os.environ | quiet)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(next((tmp_path / "out").rglob("results_*.json")).read_text())["results"]
    for name, rows in tasks.items():
        ours = score(model, tokenizer, [{**row, "context": CONTEXT.format(**row)} for row in rows], max_length=128)
        found = next((tmp_path / "out").rglob(f"samples_{name}_*.jsonl"))
        samples = [json.loads(line) for line in found.read_text().splitlines()]
        theirs = {s["doc_id"]: [float(answer[0]) for answer in s["filtered_resps"]] for s in samples}
        torch.testing.assert_close(ours.log_likelihoods, [theirs[i] for i in range(len(rows))], rtol=1e-4, atol=2e-3)
        assert (results[name]["acc,none"], results[name]["acc_norm,none"]) == pytest.approx((ours.acc, ours.acc_norm))
    assert 0 < sum(r["acc,none"] for r in results.values()) < 2  # else the agreement says little


def test_without_the_harness_the_command_says_what_to_install(tmp_path):
    code = "import sys; sys.modules['lm_eval'] = None; from dendritic_lab.evaluate.harness import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.endswith('needs lm-eval, of the extra eval; run: pip install -c constraints.txt -e ".[eval]"\n')
