"""One run or some: run, compare, verify, export, clean."""

import json
import re
import shutil
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Annotated

import typer

from dendritic_lab.cli.show import clear_errors, figures, short, stop, table

app = typer.Typer()
Out = Annotated[Path | None, typer.Option(help="Folder for the runs; default: outputs/ of the checkout.")]


@app.command()
@clear_errors
def run(
    experiment: Annotated[str, typer.Argument(help="Name of the experiment; see `dendritic-lab list`.")],
    profile: Annotated[str, typer.Option(help="smoke, quick, full, or another of the experiment's.")] = "quick",
    param: Annotated[list[str], typer.Option(
        "-p", "--param", metavar="NAME=VALUE",
        help="A parameter that differs from the profile's; repeat for more.")] = [],
    data: Annotated[str | None, typer.Option(help="Where data come from: auto, local, hub or embedded.")] = None,
    out: Out = None,
    trust: Annotated[bool, typer.Option(
        "--trust", help="EXPERIMENT is the path of a notebook from elsewhere, whose code you know.")] = False,
):
    "Run an experiment into a folder of its own and print its figures."
    from dendritic_lab.lab.experiments import Experiment, find_experiment
    given = parse_parameters(param) | ({} if data is None else {"data": data})
    found = Experiment(Path(experiment).resolve()) if trust else find_experiment(experiment)
    found.resolve(profile, given)  # refuse before the slow imports
    from dendritic_lab.lab.metrics import read_metrics
    from dendritic_lab.lab.runs import RunFailed, run_experiment
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `kill` ends a run as Ctrl-C does
    try:
        with ProgressBars() as bars: folder = run_experiment(found, profile, given, out, bars.cell, bars.started)
    except RunFailed as e:
        where = f" in cell {e.cell}" if e.cell else ""
        stop(f"{experiment} failed{where}: {e}\n  see {e.notebook if e.notebook.exists() else e.folder}", 1)
    except KeyboardInterrupt: stop(f"{experiment} was interrupted; its folder is marked as failed", 130)
    show_metrics(read_metrics(folder / "metrics.json")["metrics"], f"{experiment}, profile {profile}")
    show_finding(folder)
    typer.echo(f"report: {short(folder / 'report.html')}")


def show_finding(folder: Path):
    "Print what a run says of itself, and its verdict."
    from dendritic_lab.lab.record import verdict_on
    path = folder / "summary.json"
    if not path.exists(): return
    summary = json.loads(path.read_text(encoding="utf-8"))
    typer.echo(summary["sentence"])
    if answer := verdict_on(summary): typer.echo(f"verdict: {answer}")


def parse_parameters(pairs: list[str]) -> dict[str, str]:
    "name=value pairs of -p. Raises `UsageError` for a pair that is none, and a name that is given twice."
    from dendritic_lab.lab.experiments import UsageError
    given = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals): raise UsageError(f"-p expects name=value, got {pair!r}")
        if name in given: raise UsageError(f"parameter {name!r} is given twice")
        given[name] = value
    return given


class ProgressBars:
    """While a run goes on, two bars show the cell and the task inside it, which the kernel reports through a file.
    Without a terminal, a line per new task is printed instead."""

    def __init__(self):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
        console = Console(stderr=True)
        count = TextColumn("{task.completed:g}/{task.total:g} {task.fields[figures]}", markup=False)
        columns = [TextColumn("{task.description}", markup=False), BarColumn(), count, TimeElapsedColumn()]
        self.live, self.folder, self.task = console.is_terminal, None, ""
        self.bars = Progress(*columns, console=console, disable=not self.live)
        self.cells = self.bars.add_task("cells", total=1, figures="")
        self.inner = self.bars.add_task("", total=1, figures="", visible=False)
        self.ended, self.thread = threading.Event(), threading.Thread(target=self.follow, daemon=True)

    def __enter__(self):
        self.bars.start()
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.ended.set()
        self.thread.join()
        self.bars.stop()

    def started(self, run): self.folder = run.folder
    def cell(self, number: int, total: int): self.bars.update(self.cells, completed=number - 1, total=total)

    def follow(self):
        from dendritic_lab.fleet.watch import last_progress
        while not self.ended.wait(0.25):
            line = last_progress(self.folder)
            if line is None: continue
            if self.live: self.bars.update(self.inner, description=line["task"], completed=line["done"],
                                           total=line["total"], figures=figures(line), visible=True)
            elif line["task"] != self.task: typer.echo(f"{time.strftime('%H:%M:%S')}  {line['task']}", err=True)
            self.task = line["task"]


def show_metrics(metrics: list[dict], title: str):
    """Print the headline figures of a metrics.json, a row for each thing measured and a column for each kind of
    figure. Figures of one kind may have different units; then each says its own."""
    cells, units = {}, {}
    for m in [m for m in metrics if m.get("headline")] or metrics:
        subject, _, kind = m["name"].partition(".")
        units.setdefault(kind, set()).add(m["unit"])
        cells.setdefault(subject, {})[kind] = m
    head = [f"{kind}, {min(of)}" if len(of) == 1 else kind for kind, of in units.items()]

    def cell(m: dict | None, of: set[str]) -> str:
        return "" if m is None else with_interval(m) if len(of) == 1 else f"{with_interval(m)} {m['unit']}"
    rows = [[subject, *(cell(row.get(kind), of) for kind, of in units.items())] for subject, row in cells.items()]
    table(title, ["", *head], rows)


def with_interval(metric: dict) -> str:
    "A figure of metrics.json with its interval."
    from dendritic_lab.lab.metrics import interval_of
    return interval_text(interval_of(metric))


def interval_text(interval) -> str:
    "A `measure.Interval` for people."
    from dendritic_lab.measure import number
    return number(interval.mean) if interval.low is None else str(interval)


@app.command()
@clear_errors
def compare(
    runs: Annotated[list[Path] | None, typer.Argument(
        help="Folders of finished runs; the first one's setting is the baseline.")] = None,
    batch: Annotated[str | None, typer.Option(help="All finished runs of a batch, by its id.")] = None,
    metric: Annotated[list[str], typer.Option(help="Only this metric; repeat for more.")] = [],
    out: Out = None,
):
    "Compare runs: means with intervals over seeds, paired differences, and a report."
    from dendritic_lab.fleet.driver import batch_runs
    from dendritic_lab.lab.compare import collect, paired_differences, summarise, write_comparison
    from dendritic_lab.lab.experiments import UsageError, project_root
    from dendritic_lab.lab.runs import RunFailed
    if bool(runs) == bool(batch): raise UsageError("expected folders of runs, or --batch ID")
    if batch and not re.fullmatch(r"[a-z0-9-]+", batch):
        raise UsageError(f"--batch: expected an id such as many-0a1b2c3d, got {batch!r}")
    out = Path(out or project_root() / "outputs")
    values = collect(batch_runs(out, batch) if batch else runs)
    for unknown in set(metric) - set(values.metric):
        raise UsageError(f"no metric {unknown!r}; known: {', '.join(dict.fromkeys(values.metric))}")
    if metric: values = values[values.metric.isin(metric)]
    rows = lambda frame, count: [[r.metric, r.setting, interval_text(r.interval), r.unit, str(getattr(r, count))]
                                 for r in frame.itertuples()]
    table("means over seeds", ["metric", "setting", "mean", "unit", "seeds"], rows(summarise(values), "seeds"))
    paired, baseline = paired_differences(values), values.setting.iloc[0]
    columns = ["metric", "setting", "difference", "unit", "pairs"]
    if len(paired): table(f"less {baseline}, seed by seed", columns, rows(paired, "pairs"))
    try: folder = write_comparison(values, out)
    except RunFailed as e: stop(f"the report failed: {e}; see {e.folder}", 1)
    typer.echo(f"report: {folder / 'report.html'}")


def both(then: float | None, now: float | None) -> tuple[str, str]:
    "Two values with six digits, or with all where these do not show that they differ."
    text = lambda v, digits: "" if v is None else f"{v:.{digits}g}"
    short = text(then, 6), text(now, 6)
    return short if then == now or short[0] != short[1] else (text(then, 17), text(now, 17))


@app.command()
@clear_errors
def verify(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    keep: Annotated[Path | None, typer.Option(help="Keep the new run in this folder.")] = None,
):
    "Run an experiment again from what a run recorded, and compare. Exits 1 when what must be equal differs."
    from dendritic_lab.lab.runs import RunFailed
    from dendritic_lab.lab.verify import verify_run
    with tempfile.TemporaryDirectory() as folder:
        try: verified = verify_run(run, keep or Path(folder))
        except RunFailed as e: stop(f"{run.parent.name} failed when it was run again: {e}", 1)
    rows = [[f.metric, *both(f.then, f.now), f.verdict] for f in verified.findings]
    table(f"{run.name} run again", ["metric", "then", "now", "verdict"], rows)
    for line in verified.environment: typer.echo(f"differs: {line}")
    for name in verified.data: typer.echo(f"differs: data {name}: other content")
    same, total = len(verified.findings) - len(verified.bad), len(verified.findings)
    typer.echo(f"{same} of {total} figures are the same" + (", but the data are not" if verified.data else ""))
    if not verified.holds: raise typer.Exit(1)


@app.command()
@clear_errors
def export(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    folder: Annotated[Path, typer.Argument(help="Folder for the model: a new or an empty one.")],
    arm: Annotated[str | None, typer.Option(help="Which of the run's models; not needed where it kept one.")] = None,
):
    "Write a model that a run kept into a folder that transformers loads, with a card."
    from dendritic_lab.lab.export import export_model
    typer.echo(f"model and card: {short(export_model(run, folder, arm))}")


@app.command()
@clear_errors
def clean(
    yes: Annotated[bool, typer.Option("--yes", help="Remove them; without it they are only listed.")] = False,
    out: Out = None,
):
    "List runs that failed, were abandoned or are superseded, and with --yes remove them. Never a reference."
    from dendritic_lab.fleet.cleaning import find_removable
    from dendritic_lab.lab.experiments import UsageError, project_root
    out = Path(out or project_root() / "outputs")
    if not out.is_dir(): raise UsageError(f"{out} is not a folder")
    found = list(find_removable(out))
    size = lambda folder: sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) / 2**20
    rows = [[f"{folder.parent.name}/{folder.name}", why, f"{size(folder):.1f}"] for folder, why in found]
    if not found: return typer.echo(f"nothing to remove in {out}")
    table(f"{len(found)} runs can be removed", ["run", "why", "MiB"], rows)
    if yes:
        for folder, _ in found: shutil.rmtree(folder)
        typer.echo(f"removed {len(found)}")
    else: typer.echo("nothing was removed; --yes removes them")
