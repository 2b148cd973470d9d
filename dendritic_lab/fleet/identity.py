"""What a run is, in 64 hex digits.

A run whose experiment, code, effective parameters and data are those of a finished one need not be repeated. The
code is the notebook's cells and every file of the packages; which of them an experiment uses is not asked, so an
edit anywhere repeats all runs.
"""

import hashlib
import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from dendritic_lab.lab.experiments import Experiment

READ_UP_TO = 64 * 2**20  # bytes; larger files count by size and time of change


def digest(*parts: bytes | str) -> str:
    "sha256 over parts, each with its length, so that no two lists of parts are alike."
    sha = hashlib.sha256()
    for part in parts:
        part = part.encode() if isinstance(part, str) else part
        sha.update(len(part).to_bytes(8, "big") + part)
    return sha.hexdigest()


@cache
def digest_folder(folder: Path) -> str:
    "sha256 over the files below a folder; asked for again, the first answer stands."
    parts = []
    for path in sorted(p for p in Path(folder).rglob("*") if p.is_file() and "__pycache__" not in p.parts):
        stat = path.stat()
        content = path.read_bytes() if stat.st_size <= READ_UP_TO else f"{stat.st_size} {stat.st_mtime_ns}"
        parts += [str(path.relative_to(folder)), content]
    return digest(*parts)


def code_digest(experiment: Experiment) -> str:
    "sha256 over the cells of the notebook and all files of dendritic_lab and dendritic_kernels."
    packages = [spec for spec in map(find_spec, ("dendritic_lab", "dendritic_kernels")) if spec]
    cells = [f"{c['cell_type']} {''.join(c['source'])}" for c in experiment.cells]
    return digest(*cells, *(digest_folder(Path(p.submodule_search_locations[0])) for p in packages))


def data_digest(parameters: dict) -> str:
    """sha256 over the user's folder of data, where the parameter `data` may lead to it, and over files and folders
    whose absolute paths are parameters."""
    from dendritic_lab.data.sources import local_dir
    local = local_dir() if parameters.get("data", "embedded") in ("auto", "local") else None
    texts = [v for v in parameters.values() if isinstance(v, str) and len(v) < 4096 and "\0" not in v]
    named = [path for path in map(Path, texts) if path.is_absolute() and path.exists()]
    contents = [digest_folder(path) if path.is_dir() else path.read_bytes() for path in named]
    return digest(*([digest_folder(local)] if local else []), *contents)


def identity(
    experiment: Experiment,
    parameters: dict,  # effective
) -> str:  # 64 hex digits
    "sha256 over experiment, code, effective parameters and data."
    written = json.dumps(parameters, sort_keys=True)
    return digest(experiment.name, code_digest(experiment), written, data_digest(parameters))
