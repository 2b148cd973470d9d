"""Many runs: batch, demo, sweep, watch."""

import signal
import time
from pathlib import Path
from typing import Annotated

import typer

from dendritic_lab.cli.show import LiveView, PlainView, clear_errors, duration, short, sparkline, stop, table

app = typer.Typer()
Out = Annotated[Path | None, typer.Option(help="Folder for the runs; default: outputs/ of the checkout.")]
Tracker = Annotated[str | None, typer.Option(help="Hand finished runs to wandb or trackio.")]


def check_option(good: bool, name: str, expected: str, got):
    "Raises `UsageError` for an option with a value that cannot be."
    from dendritic_lab.lab.experiments import UsageError
    if not good: raise UsageError(f"{name}: expected {expected}, got {got}")


@app.command()
@clear_errors
def batch(
    file: Annotated[Path, typer.Argument(help="Batch file: experiments, profiles, grid, list, seeds, resources.")],
    dry: Annotated[bool, typer.Option("--dry-run", help="Print the runs and stop.")] = False,
    engine: Annotated[str, typer.Option(help="local or ray.")] = "local",
    workers: Annotated[int | None, typer.Option(
        help="Runs at a time; default: one a GPU, or one for two cores; with ray what its resources allow.")] = None,
    address: Annotated[str | None, typer.Option(
        help="Ray cluster: auto or ray://host:port; default: this machine.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a batch that was started before.")] = False,
    retry: Annotated[int, typer.Option(help="How often a failed run is tried again.")] = 0,
    out: Out = None,
    tracker: Tracker = None,
):
    "Run many: a grid, a list, seeds. Finished runs are not repeated, and one that fails does not stop the others."
    from dendritic_lab.fleet.driver import open_batch, start_engine
    from dendritic_lab.fleet.plan import read_plan
    from dendritic_lab.fleet.trackers import find_tracker
    from dendritic_lab.lab.experiments import UsageError, project_root
    check_option(engine in ("local", "ray"), "--engine", "local or ray", repr(engine))
    if address is not None and engine != "ray": raise UsageError("--address is for --engine ray")
    check_option(workers is None or 1 <= workers <= 1024, "--workers", "1 to 1024", workers)
    check_option(0 <= retry <= 100, "--retry", "0 to 100", retry)
    send_to = tracker and find_tracker(tracker)
    plan, root = read_plan(file), project_root()
    out = Path(out or root / "outputs").resolve()
    if dry: return show_plan(plan, out)
    folder, lock = open_batch(plan, out, resume)
    with lock:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with start_engine(engine, workers, address, folder, plan, root) as started:
            again = f"dendritic-lab batch {plan.file} --resume"
            driver = drive(plan, started, out, retry, folder, send_to, again)
    if driver.failed: raise typer.Exit(1)


def show_plan(plan, out: Path):
    "What a batch would do, a row for each run."
    from dendritic_lab.fleet.driver import finished_runs
    rows = []
    for i, (run, finished) in enumerate(zip(plan.runs, finished_runs(plan, out)), 1):
        gpus = "one, if any" if run.resources.gpus is None else f"{run.resources.gpus:g}"
        given = " ".join(f"{k}={v}" for k, v in run.given.items())
        rows.append([str(i), run.experiment.name, run.profile, given, f"{run.resources.cpus or 'a part'} / {gpus}",
                     "finished" if finished else "to run"])
    repeated = f", {plan.repeated} named twice" if plan.repeated else ""
    columns = ["", "experiment", "profile", "parameters", "cpus / gpus", "state"]
    table(f"batch {plan.id}: {len(plan.runs)} runs{repeated}", columns, rows)


def drive(plan, engine, out: Path, retry: int, folder: Path, tracker, again: str):  # again: the command to go on
    "Run the plan and show it; an interrupt leaves what was running marked as failed. Returns the driver."
    from rich.console import Console

    from dendritic_lab.fleet.account import Journal
    from dendritic_lab.fleet.driver import Driver
    from dendritic_lab.fleet.trackers import track
    console = Console()
    with LiveView(console) if console.is_terminal else PlainView() as view:
        def show(account, event: str, rest: dict):
            view(account, event, rest)
            if tracker and event == "done": track(tracker, plan.id, account.run, account.folder)
        driver = Driver(plan, engine, out, retry, Journal(folder / "events.jsonl"), show)
        driver.journal.note("batch", runs=len(plan.runs))
        try:
            driver.prepare()
            driver.go(lambda: view.refresh(driver))
        except KeyboardInterrupt:
            driver.interrupt()
            conclude(driver)
            stop(f"interrupted; go on with: {again}", 130)
    conclude(driver)
    return driver


DEMO = "nbs/experiments/demo.batch.yaml"


@app.command()
@clear_errors
def demo(out: Out = None):
    "All systems in a few minutes: a short run for each, then one page. Given again, it goes on where it was."
    from dendritic_lab.fleet.driver import finished_runs, open_batch, start_engine
    from dendritic_lab.fleet.plan import read_plan
    from dendritic_lab.lab.demo import NEXT, demo_lines, write_demo
    from dendritic_lab.lab.experiments import project_root
    root = project_root()
    out, plan = Path(out or root / "outputs").resolve(), read_plan(root / DEMO)
    folder, lock = open_batch(plan, out, resume=(out / "batches" / plan.id / "plan.json").exists())
    with lock:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with start_engine("local", 2, None, folder, plan, root) as started:
            driver = drive(plan, started, out, 0, folder, None, "dendritic-lab demo")
    runs = [run for run in finished_runs(plan, out) if run]
    for line in demo_lines(runs): typer.echo(f"\n{line}")
    typer.echo(f"\nwith pictures: {short(write_demo(runs, out / 'demo'))}")
    for command, meaning in NEXT: typer.echo(f"next: {command}  ({meaning})")
    if driver.failed: raise typer.Exit(1)


def conclude(driver):
    "Print what failed and why, and how many runs there are of each kind."
    from dendritic_lab.fleet.account import failure
    rows = []
    for account in driver.failed:
        last = account.failures[-1]
        rows.append([str(account.run), str(len(account.failures)), failure(last), short(last["folder"])])
    if rows: table(f"{len(rows)} failed", ["run", "attempts", "why", "folder"], rows)
    counts = {status: n for status in ("done", "reused", "failed", "queued") if (n := driver.counts()[status])}
    typer.echo(f"batch {driver.plan.id}: " + ", ".join(f"{n} {status}" for status, n in counts.items()))
    driver.journal.note("end", **counts)


@app.command()
@clear_errors
def sweep(
    file: Annotated[Path, typer.Argument(help="Sweep file: experiment, metric, search and more.")],
    workers: Annotated[int, typer.Option(help="Trials at a time.")] = 1,
    out: Out = None,
    tracker: Tracker = None,
):
    "Search an experiment's parameters with Optuna. Given again, it goes on; several processes may share it."
    from dendritic_lab.fleet.study import open_search
    from dendritic_lab.fleet.sweep import read_sweep
    from dendritic_lab.fleet.trackers import find_tracker
    from dendritic_lab.lab.experiments import project_root
    check_option(1 <= workers <= 1024, "--workers", "1 to 1024", workers)
    send_to, wanted = tracker and find_tracker(tracker), read_sweep(file)
    out = Path(out or project_root() / "outputs").resolve()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with open_search(wanted, workers, out, typer.echo, send_to) as search:
        try: search.go()
        except KeyboardInterrupt:
            search.interrupt()
            stop(f"interrupted; go on with: dendritic-lab sweep {file}", 130)
    best = show_sweep(search, out)
    if search.gave_up or not best: raise typer.Exit(1)


def show_sweep(search, out: Path) -> list[dict]:
    "Print the best trials, write the report, and return them."
    from dendritic_lab.fleet.study import best_trials, describe, write_sweep_report
    from dendritic_lab.lab.runs import RunFailed
    sweep, about = search.sweep, describe(search.sweep, search.study)
    best = best_trials(about)
    value = lambda v: f"{v:.6g}" if isinstance(v, float) else str(v)
    rows = [[str(t["trial"]), value(t["value"]), *(value(t[name]) for name in sweep.search)] for t in best]
    title = f"sweep {sweep.id}: {len(about['trials'])} trials, the best"
    table(title, ["trial", sweep.metric, *sweep.search], rows)
    if not best: return best
    try: typer.echo(f"report: {write_sweep_report(about, sweep.id, out) / 'report.html'}")
    except RunFailed as e: stop(f"the report failed: {e}; see {e.folder}", 1)
    return best


COLUMNS = ["experiment", "run", "phase", "done", "epoch", "loss", "", "best", "time left", "silent for"]


def underway_row(run) -> list[str]:
    "The columns of a run that is under way."
    from dendritic_lab.measure import number
    text = lambda v: "" if v is None else number(v)
    done = "" if run.share is None else f"{100 * run.share:.0f} %"
    return [run.experiment, run.name, run.phase or "starting", done, text(run.epoch), text(run.loss),
            sparkline(list(run.losses)), text(run.best), duration(run.left),
            duration(run.quiet) if run.quiet > 5 else ""]


@app.command()
@clear_errors
def watch(
    out: Out = None,
    once: Annotated[bool, typer.Option("--once", help="Print the state and stop, as when piped.")] = False,
    every: Annotated[float, typer.Option(help="Seconds between two updates.")] = 1.0,
):
    "Show what is running: phase, epoch, best score, loss, time left and GPUs."
    from rich.console import Console, Group
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    from dendritic_lab.fleet.watch import gpu_lines, running
    from dendritic_lab.lab.experiments import UsageError, project_root
    out = Path(out or project_root() / "outputs")
    if not out.is_dir(): raise UsageError(f"{out} is not a folder")
    check_option(0.1 <= every <= 3600, "--every", "0.1 to 3600 seconds", f"{every:g}")
    console = Console()
    if once or not console.is_terminal:
        rows = [underway_row(run) for run in running(out)]
        for line in [COLUMNS, *rows] if rows else [["nothing is running"]]: typer.echo("\t".join(line))
        for line in gpu_lines(): typer.echo(line)
        return

    def draw():
        drawn = Table(*COLUMNS, box=None)
        for run in running(out): drawn.add_row(*map(Text, underway_row(run)))
        return Group(drawn if drawn.row_count else Text("nothing is running"), *map(Text, gpu_lines()))
    try:
        with Live(draw(), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(every)
                live.update(draw(), refresh=True)
    except KeyboardInterrupt: pass
