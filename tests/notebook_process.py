"""Runs a notebook in a process of its own, forked from a server that has imported what most notebooks import.

A notebook that leaves memory, threads or settings behind leaves them in its own process; and starting one costs
a fifth of a second instead of the ten that the imports take.
"""

import multiprocessing
import os
import sys
import warnings
from pathlib import Path

IMPORTS = ["dendritic_lab.torchvision_ops", "torch", "transformers", "transformers.models.bert.modeling_bert",
           "datasets", "timm", "pandas", "scipy.stats", "sklearn", "matplotlib.pyplot", "seaborn", "nbdev.test",
           __name__]
SECONDS = 1800  # generous: a notebook that takes longer is stuck
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(IMPORTS)


def execute(path: Path, root: Path, log: Path):
    "In the new process: run `path` as nbdev does, with our own warnings as errors; what it prints goes into `log`."
    written = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(written, 1)
    os.dup2(written, 2)
    from nbdev.test import test_nb
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.filterwarnings("error", module=r"dendritic_lab\b")
        passed, _seconds = test_nb(path, skip_flags=["notest", "slow", "gpu"], basepath=root)
    sys.exit(not passed)


def run_notebook(path: Path, root: Path, log: Path) -> str:
    "Why a notebook failed, with the end of what it printed; empty where it passed."
    process = context.Process(target=execute, args=(path, root, log))
    process.start()
    process.join(SECONDS)
    if process.is_alive():
        process.kill()
        return f"{path.name} was not finished after {SECONDS} seconds"
    said = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return f"{path.name} failed with exit code {process.exitcode}:\n{said[-8000:]}" if process.exitcode else ""
