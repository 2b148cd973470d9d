"""Two processes train as one does at the same global batch, and a killed run goes on as if nothing had happened."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.xdist_group("distributed")  # one worker: what its tests share is made once

COMMON = """
import json, os, signal, sys
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader
from dendritic_lab.training import fit
folder, rank = Path(sys.argv[1]), os.environ.get("RANK", "0")
first = rank == "0"
figures = lambda done, name: [r[name] for r in done.history]
flat = lambda parameters: torch.cat([p.detach().flatten() for p in parameters]).tolist()
def say(name, **content): (folder / f"{name}.json").write_text(json.dumps(content))
"""
PLAIN = COMMON + """
torch.manual_seed(0)
x = torch.randn(24, 6)
rows = [{"x": a, "y": a[:2].sum()} for a in x]
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(float(os.environ.get("DROPOUT", 0))), nn.Linear(8, 1))
loss = lambda m, b: (m(b["x"])[:, 0] - b["y"]).square().mean()
seen = []
def evaluate(m):
    seen.append(0)
    if len(seen) == 2 and "STOP" in os.environ:
        if os.environ["STOP"] == "kill": os.kill(os.getpid(), 9)
        sys.exit(7)
    return {"error": float(loss(m, {"x": x, "y": x[:, :2].sum(1)}))}
done = fit(model, DataLoader(rows, 8, shuffle=True), loss=loss, evaluate=evaluate, monitor="error", maximize=False,
           epochs=3, lr=0.02, seed=3, checkpoint=folder / "checkpoint", cpu=True, shard="SHARD" in os.environ)
if first: say("result", losses=figures(done, "loss"), errors=figures(done, "error"), weights=flat(model.parameters()))
"""
PERFORATED = PLAIN + """
from dendritic_lab.models import perforated_layer
from dendritic_lab.models.perforated_bert import PerforatedBertConfig, PerforatedBertForSequenceClassification
from dendritic_lab.training.phases import train_phases
# Without noise: each process draws its own, so it cannot be that of one process.
draw = perforated_layer.gumbel_sigmoid
perforated_layer.gumbel_sigmoid = lambda logits, temperature, training: draw(logits, temperature, training=False)
torch.manual_seed(0)
config = PerforatedBertConfig(
    vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
    max_position_embeddings=32, block_size=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=2)
model = PerforatedBertForSequenceClassification(config)
ids = torch.randint(1, 50, (16, 32))
rows = [{"input_ids": i, "attention_mask": torch.ones(32, dtype=torch.long), "labels": i[0] % 2} for i in ids]
rates = {"lr": 1e-3, "scorer_lr": 1e-2}
done = train_phases(model, DataLoader(rows, 8, shuffle=True), sparsity=0.4, keep_ratio=0.5, cpu=True, **rates)
if first:
    losses = [loss for phase in done.values() for loss in figures(phase, "loss")]
    say("perforated", losses=losses, weights=flat([*model.parameters(), model.base_model.controller.offsets]))
"""
GROWN = COMMON + """
from types import SimpleNamespace
import torch.nn.functional as F
from dendritic_lab.growth import GrowthConfig, export, growth_session
class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(4, 8), nn.Linear(8, 2)
    def forward(self, x, labels=None):
        logits = self.out(self.hidden(x).relu())
        return SimpleNamespace(loss=None if labels is None else F.cross_entropy(logits, labels), logits=logits)
torch.manual_seed(0)
x = torch.randn(32, 4)
labels = (x[:, 0] * x[:, 1] > 0).long()
rows = [{"x": a, "labels": b} for a, b in zip(x, labels)]
torch.manual_seed(1)
model = Small()
score = lambda m: {"loss": F.cross_entropy(m(x).logits, labels).item()}
config = GrowthConfig(switch_mode="fixed", fixed_switch_num=2, maximizing_score=False,
                      library={"retain_all_dendrites": True})
with growth_session(folder / "growth", config) as session:
    done = fit(session.perforate(model), DataLoader(rows, 8, shuffle=True), epochs=6, lr=0.02, schedule="constant",
               seed=3, cpu=True, growth=session, evaluate=score, monitor="loss", maximize=False)
export(model)
weights = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
content = {"losses": figures(done, "loss"), "scores": figures(done, "validation_loss"),
           "dendrites": figures(done, "dendrites"), "weights": weights}
(folder / f"grown{rank}.json").write_text(json.dumps(content))
(folder / "result.json").write_text("{}")
"""
LIQUID = COMMON + """
from dendritic_lab.models.liquid_vit import LiquidViT, LiquidViTConfig
torch.manual_seed(0)
config = LiquidViTConfig(
    image_size=16, width=16, heads=2, depth=3, gate_layers=(1, 2), gate_dim=4, state_dim=4,
    diversity_weight=0.0)  # the loss for diversity is not a mean over images
model = LiquidViT(config)
if not first: nn.init.zeros_(model.head.weight)   # the first process's weights are everyone's
rows = [{"pixel_values": torch.randn(3, 16, 16), "labels": torch.tensor(i % 10)} for i in range(16)]
every = {k: torch.stack([r[k] for r in rows]) for k in rows[0]}
evaluate = lambda m: {"error": float(m(**every).loss)}
done = fit(model, DataLoader(rows, 8, shuffle=True), evaluate=evaluate, monitor="error", maximize=False, epochs=3,
           lr=0.01, seed=3, cpu=True, shard="SHARD" in os.environ)
if first:
    errors, after = figures(done, "error"), evaluate(model)["error"]
    say("result", losses=figures(done, "loss"), errors=errors, after=after, best=min(errors))
"""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run(code: str, folder: Path, processes: int, expected: int = 0, **environment: str) -> dict:
    "What `fit` gave to the first of the processes."
    folder.mkdir(exist_ok=True)
    port = free_port()
    variables = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    variables |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} | environment
    group = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1",
             "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    place = lambda i: group | {"RANK": str(i), "LOCAL_RANK": str(i)} if processes > 1 else {}
    command = [sys.executable, "-c", code, str(folder)]
    started = [subprocess.Popen(command, env=variables | place(i), stderr=subprocess.PIPE, text=True)
               for i in range(processes)]
    said = [p.communicate(timeout=240)[1] for p in started]
    assert {p.returncode for p in started} == {expected}, "\n".join(said)
    return json.loads((folder / "result.json").read_text()) if not expected else {}


def close(a: dict, b: dict, tolerance: float = 1e-5):
    for key in a: torch.testing.assert_close(torch.tensor(a[key]), torch.tensor(b[key]), rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    "Plain and perforated training in one process."
    folder = tmp_path_factory.mktemp("alone")
    run(PERFORATED, folder, 1)
    return folder


def test_two_processes_are_one_at_the_same_global_batch(tmp_path, alone):
    run(PERFORATED, tmp_path, 2)
    for name, losses, tolerance in (("result.json", 3, 1e-5), ("perforated.json", 4, 2e-4)):
        one, two = (json.loads((folder / name).read_text()) for folder in (alone, tmp_path))
        assert len(one["losses"]) == losses
        close(one, two, tolerance)


def test_dendrites_grow_alike_in_two_processes(tmp_path):
    run(GROWN, tmp_path / "alone", 1)
    run(GROWN, tmp_path / "both", 2)
    names = ("alone/grown0.json", "both/grown0.json", "both/grown1.json")
    one, first, second = (json.loads((tmp_path / name).read_text()) for name in names)
    assert max(one["dendrites"]) == 2 and one["dendrites"] == first["dendrites"]
    assert first["weights"] == second["weights"]
    close(one, first, 1e-4)
    assert (tmp_path / "both/growth/history.csv").exists() and (tmp_path / "both/growth/process1/history.csv").exists()


def test_weights_spread_over_two_processes_train_as_whole_ones(tmp_path, alone):
    whole, spread = json.loads((alone / "result.json").read_text()), run(PLAIN, tmp_path / "spread", 2, SHARD="1")
    close(whole, spread)
    run(PLAIN, tmp_path / "stopped", 2, expected=7, STOP="exit", SHARD="1")
    run(PLAIN, tmp_path / "stopped", 1, expected=7, STOP="exit")
    close(whole, run(PLAIN, tmp_path / "stopped", 2, SHARD="1"))


def test_a_model_of_layers_and_gates_is_spread(tmp_path):
    whole, spread = run(LIQUID, tmp_path / "whole", 1), run(LIQUID, tmp_path / "spread", 2, SHARD="1")
    close(whole, spread, 1e-4)
    assert abs(spread["after"] - spread["best"]) < 1e-5   # the model that was given has the best epoch's weights


def test_a_notebook_launches_two_processes(tmp_path, alone):
    launch = f"""from accelerate import notebook_launcher
def train(): exec({PLAIN!r}, {{}})
notebook_launcher(train, num_processes=2, use_port='{free_port()}')"""
    close(json.loads((alone / "result.json").read_text()), run(launch, tmp_path, 1, ACCELERATE_USE_CPU="true"))


def test_a_checkpoint_is_resumed_by_another_number_of_processes(tmp_path, alone):
    run(PLAIN, tmp_path, 2, expected=7, STOP="exit")
    run(PLAIN, tmp_path, 1, expected=7, STOP="exit")
    assert json.loads((tmp_path / "checkpoint/state.json").read_text())["epoch"] == 2
    close(json.loads((alone / "result.json").read_text()), run(PLAIN, tmp_path, 2))


def test_a_killed_run_ends_with_the_same_weights(tmp_path):
    whole = run(PLAIN, tmp_path / "whole", 1, DROPOUT="0.3")
    run(PLAIN, tmp_path / "killed", 1, expected=-signal.SIGKILL, STOP="kill", DROPOUT="0.3")
    assert load_file(tmp_path / "killed/checkpoint/model.safetensors")
    assert run(PLAIN, tmp_path / "killed", 1, DROPOUT="0.3") == whole   # bit by bit
