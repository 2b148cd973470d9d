"""Runs that nobody needs: failed ones, ones that nothing works on any more, and complete ones of which a newer one
with the same parameters exists. `reference` lies deeper than runs and is never looked at, nor is a link to somewhere
else."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import yaml

from dendritic_lab.fleet.recovery import run_lock
from dendritic_lab.fleet.watch import NOT_EXPERIMENTS

QUIET_HOURS = 24


def find_removable(out: Path) -> Iterator[tuple[Path, str]]:  # folder, why
    "Runs that can be removed, with the reason."
    newest = {}
    for folder in sorted(_runs(Path(out)), key=lambda p: p.name, reverse=True):
        if folder.suffix == ".failed": yield folder, "failed"
        elif folder.suffix == ".running":
            if is_abandoned(folder, out): yield folder, "abandoned"
        elif (what := _parameters(folder)) is not None:
            if (folder.parent, what) in newest: yield folder, f"superseded by {newest[folder.parent, what]}"
            else: newest[folder.parent, what] = folder.name


def _runs(out: Path) -> Iterator[Path]:
    for folder in out.glob("*/*"):
        if folder.is_symlink() or folder.parent.is_symlink() or folder.parent.name in NOT_EXPERIMENTS: continue
        if (folder / "params.yaml").is_file(): yield folder


def _parameters(folder: Path) -> str | None:
    "What a run was made of, as text; None where it cannot be read."
    try: return json.dumps(yaml.safe_load((folder / "params.yaml").read_text(encoding="utf-8")), sort_keys=True)
    except (yaml.YAMLError, ValueError, TypeError): return None


def is_abandoned(folder: Path, out: Path) -> bool:
    """Whether nothing works on a `.running` folder. For a run of a batch its lock is free; for another, no process of
    this machine has it and no file changed for a day."""
    import psutil
    try:
        identity = json.loads((folder / "identity.json").read_text(encoding="utf-8"))["identity"]
        with run_lock(out, identity) as free: return free
    except (OSError, ValueError, KeyError, TypeError): pass
    for process in psutil.process_iter():
        try:
            if process.environ().get("DENDRITIC_LAB_RUN") == str(folder.resolve()): return False
        except psutil.Error: continue
    changed = max(p.stat().st_mtime for p in [folder, *folder.rglob("*")])
    return time.time() - changed > 3600 * QUIET_HOURS
