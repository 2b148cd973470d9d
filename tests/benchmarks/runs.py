"""What a run costs beyond its notebook, and how near a batch comes to its ideal.

    python tests/benchmarks/runs.py --rounds 5 --runs 100 --workers 2 --out runs.json

The notebook sleeps for `--seconds`, as one that waits for a GPU would. Measured are, in turns, the process of
`dendritic-lab run` and a process that executes the same notebook with nbclient and nothing else; then a batch
of `--runs` seeds. The ideal of the batch is the time of one of its runs in a warm worker, measured with one
worker, times the runs, over the workers. On a machine with fewer cores than workers the ideal cannot be reached.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

LAB = [sys.executable, "-c", "from dendritic_lab.cli import main; main()"]
DIRECT = """import sys, nbformat
from nbclient import NotebookClient
NotebookClient(nbformat.read(sys.argv[1], 4), kernel_name='python3').execute()"""
RECORD = """import json, os, pathlib, time
time.sleep(seconds)
metric = {"name": "tiny.seed", "value": seed, "unit": "count", "values": [seed], "seeds": [], "interval": None,
          "confidence": 0.95, "basis": "one value", "measured_by": "results", "null": None,
              "claims": [], "where": {}, "setting": "",
          "headline": False}
content = {"schema": 2, "experiment": "tiny", "metrics": [metric], "data": []}
_ = pathlib.Path(os.environ.get("DENDRITIC_LAB_RUN", "."), "metrics.json").write_text(json.dumps(content))"""


def make_checkout(folder: Path, seconds: float):
    "A checkout with the experiment `tiny`."
    lines = f"seed: int = 0  # of what is random\nseconds: float = {seconds}  # to sleep"
    parameters = new_code_cell(lines, metadata={"tags": ["parameters"]})
    kernel = {"kernelspec": {"name": "python3", "display_name": "python3", "language": "python"}}
    (folder / "nbs/experiments").mkdir(parents=True)
    (folder / "settings.ini").touch()
    cells = [new_markdown_cell("# Tiny\n\n> What does it cost?"), parameters, new_code_cell(RECORD)]
    nbformat.write(new_notebook(cells=cells, metadata=kernel), folder / "nbs/experiments/tiny.ipynb")


def timed(command: list[str], folder: Path) -> float:
    "Seconds that a command takes. Raises `CalledProcessError` when it fails."
    start = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return time.perf_counter() - start


def overhead(folder: Path, rounds: int) -> dict:
    "A run's process against one that only executes the notebook, in turns."
    run = [*LAB, "run", "tiny", "--profile", "smoke"]
    direct = [sys.executable, "-c", DIRECT, "nbs/experiments/tiny.ipynb"]
    pairs = [(timed(run, folder), timed(direct, folder)) for _ in range(rounds)]
    return {"run_seconds": [a for a, _ in pairs], "direct_seconds": [b for _, b in pairs],
            "overhead_seconds": statistics.median(a - b for a, b in pairs)}


def journal_seconds(folder: Path, name: str) -> tuple[float, list[float]]:
    "Seconds of a batch, and of each of its runs but a worker's first, from its journal."
    journal, = folder.glob(f"outputs/batches/{name}-*/events.jsonl")
    events = [json.loads(line) for line in journal.read_text().splitlines()]
    started = {e["identity"]: e["time"] for e in events if e["event"] == "started"}
    runs = sorted((e["time"], e["time"] - started[e["identity"]]) for e in events if e["event"] == "done")
    return events[-1]["time"] - events[0]["time"], [seconds for _, seconds in runs[1:]]


def batches(folder: Path, runs: int, workers: int, seconds: float) -> dict:
    "One worker for a tenth of the runs, then all runs on all workers."
    few = max(3, runs // 10)
    (folder / "alone.yaml").write_text(f"experiments: tiny\nprofiles: smoke\nseeds: {few}\n")
    seeds = list(range(1000, 1000 + runs))
    many = f"experiments: tiny\nprofiles: smoke\nlist: [{{seconds: {seconds}}}]\nseeds: {seeds}\n"
    (folder / "many.yaml").write_text(many)
    timed([*LAB, "batch", "alone.yaml", "--workers", "1"], folder)
    timed([*LAB, "batch", "many.yaml", "--workers", str(workers)], folder)
    alone, batch = statistics.median(journal_seconds(folder, "alone")[1]), journal_seconds(folder, "many")[0]
    ideal = alone * runs / workers
    return {"runs": runs, "workers": workers, "one_run_seconds": alone, "ideal_seconds": ideal, "batch_seconds": batch,
            "ratio": batch / ideal}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=Path("runs.json"))
    given = parser.parse_args()
    from dendritic_lab.lab.environment import describe_hardware
    with tempfile.TemporaryDirectory() as folder:
        make_checkout(Path(folder), given.seconds)
        result = {"hardware": describe_hardware(), "load_before": os.getloadavg()[0],
                  "run": overhead(Path(folder), given.rounds),
                  "batch": batches(Path(folder), given.runs, given.workers, given.seconds)}
    given.out.write_text(json.dumps(result, indent=1))
    print(json.dumps(result["run"] | result["batch"], indent=1))


if __name__ == "__main__": main()
