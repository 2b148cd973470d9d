"""A run that takes over another run's checkpoint says so in its folder."""

import hashlib
import json
import subprocess
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from dendritic_lab.training import fit

ROWS = [{"x": torch.ones(2) * i} for i in range(8)]


def train(run: Path | None, checkpoint: Path, monkeypatch, epochs: int = 2) -> list[dict]:
    "Train in a run's folder; what that folder says of checkpoints afterwards."
    if run is None: monkeypatch.delenv("DENDRITIC_LAB_RUN", raising=False)
    else:
        run.mkdir(parents=True, exist_ok=True)
        monkeypatch.setenv("DENDRITIC_LAB_RUN", str(run))
    loss = lambda model, batch: model(batch["x"]).square().mean()
    fit(nn.Linear(2, 1), DataLoader(ROWS, 4), loss=loss, epochs=epochs, cpu=True, checkpoint=checkpoint)
    lines = run / "checkpoints.jsonl" if run else checkpoint / "none"
    return [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []


def test_the_run_of_another_folders_checkpoint_is_recorded(tmp_path, monkeypatch, root):
    first, second = tmp_path / "20260101-100000-aaaaaa.running", tmp_path / "20260102-100000-bbbbbb.running"
    assert train(first, tmp_path / "kept" / "dense-0", monkeypatch) == []   # nothing was there to take over
    (line,) = train(second, tmp_path / "kept" / "dense-0", monkeypatch)
    told = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    commit = told.strip() if (root / ".git").exists() else None
    weights = (tmp_path / "kept/dense-0/model.safetensors").read_bytes()
    assert line == {"path": "dense-0/model.safetensors", "sha256": hashlib.sha256(weights).hexdigest(),
                    "run": "20260101-100000-aaaaaa", "commit": commit, "step": 4}
    assert len(train(second, tmp_path / "kept" / "dense-0", monkeypatch)) == 2   # each use is a line


def test_outside_of_a_run_nothing_is_written_and_the_origin_is_unknown(tmp_path, monkeypatch):
    for _ in range(2): assert train(None, tmp_path / "checkpoint", monkeypatch) == []
    assert not list(tmp_path.rglob("checkpoints.jsonl"))
    (line,) = train(tmp_path / "run", tmp_path / "checkpoint", monkeypatch)
    assert line["run"] is None


def test_a_checkpoint_of_an_earlier_version_names_no_origin(tmp_path, monkeypatch):
    train(None, tmp_path / "checkpoint", monkeypatch)
    state = json.loads((tmp_path / "checkpoint/state.json").read_text())
    del state["origin"]
    (tmp_path / "checkpoint/state.json").write_text(json.dumps(state))
    (line,) = train(tmp_path / "run", tmp_path / "checkpoint", monkeypatch)
    assert (line["run"], line["commit"], line["step"]) == (None, None, 4)
