"""What every command prints with: tables, one clear line for an error, durations, the state of a batch."""

import sys
import time
from collections import deque
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import NoReturn

import typer


def stop(message: str, code: int) -> NoReturn:
    "End the command with one line and an exit code."
    typer.echo(f"dendritic-lab: {message}", err=True)
    raise typer.Exit(code)


def clear_errors(command: Callable) -> Callable:
    "A command that turns what the user can mend into one line and an exit code."
    @wraps(command)
    def clear(*args, **kwargs):
        from dendritic_lab.data.sources import DataError
        from dendritic_lab.extras import MissingExtra
        from dendritic_lab.lab.experiments import UsageError
        from dendritic_lab.lab.metrics import MetricsError
        try: return command(*args, **kwargs)
        except (UsageError, MetricsError, MissingExtra) as e: stop(str(e), 2)
        except DataError as e: stop(str(e), 1)
    return clear


def table(title: str, columns: list[str], rows: list[list[str]]):
    "Print a table that fits the terminal; when piped, wide enough for everything."
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
    drawn = Table(*columns, title=Text(title), title_justify="left")
    for row in rows: drawn.add_row(*map(Text, row))  # Text: brackets are brackets, not markup
    console = Console()
    if not console.is_terminal: console = Console(width=240)
    console.print(drawn)


def duration(seconds: float | None) -> str:
    "3 h 5 min, 2 min 10 s or 7 s; a dash where it is not known."
    if seconds is None: return "-"
    minutes, s = divmod(round(max(0, seconds)), 60)
    if minutes >= 60: return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {s} s" if minutes else f"{s} s"


def short(path: Path | str | None) -> str:
    "A path as seen from the current folder."
    if not path: return ""
    path = Path(path)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: list[float], width: int = 20) -> str:
    "Each value as a bar between the least and the largest; means of equal parts where there are more than `width`."
    if not values: return ""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:])]
    low, span = min(values), max(values) - min(values)
    return "".join(BARS[int((v - low) / span * (len(BARS) - 1)) if span else 0] for v in values)


def figures(line: dict) -> str:
    "The figures of a line of progress."
    from dendritic_lab.fleet.watch import figures_of
    from dendritic_lab.measure import number
    return "  ".join(f"{name} {number(value)}" for name, value in figures_of(line).items())


class PlainView:
    "A line for each event of a batch."

    def __init__(self, stream=None): self.stream = stream or sys.stdout

    def __call__(self, account, event: str, rest: dict):
        if event in ("cell", "waiting"): return
        line = f"{time.strftime('%H:%M:%S')}  {event:8} {account.run}  {self.details(account, event, rest)}"
        print(line.rstrip(), file=self.stream, flush=True)

    def details(self, account, event: str, rest: dict) -> str:
        from dendritic_lab.fleet.account import failure
        if event == "done": return duration(account.seconds)
        if event == "reused": return Path(rest["folder"]).name
        if event == "failed": return failure(rest) + (" (again later)" if rest.get("again") else "")
        return f"{Path(rest['folder']).name}: {rest['reason']}" if event == "damaged" else ""

    def __enter__(self): return self
    def __exit__(self, *error): pass
    def refresh(self, driver): pass


class LiveView:
    "A table that is drawn anew: counts, what is running and how far it is, and the latest failures."

    def __init__(self, console):
        from rich.live import Live
        self.live, self.recent = Live(console=console, refresh_per_second=4, transient=True), deque(maxlen=5)

    def __call__(self, account, event: str, rest: dict):
        from dendritic_lab.fleet.account import failure
        if event == "failed": self.recent.append(f"{account.run}: {failure(rest)}")
        if event == "damaged": self.recent.append(f"{account.run}: damaged, made again: {rest['reason']}")

    def __enter__(self):
        self.live.__enter__()
        return self

    def __exit__(self, *error): self.live.__exit__(*error)

    def refresh(self, driver): self.live.update(self.draw(driver))

    def draw(self, driver):
        "The table, as rich draws it."
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        from dendritic_lab.fleet.account import STATUSES
        counts = driver.counts()
        head = "  ".join(f"{status} {counts[status]}" for status in STATUSES)
        runs = Table("run", "cell", "progress", "figures", "time", box=None)
        for account in driver.running: runs.add_row(*map(Text, self.row(account)))
        failures = [Text(line, style="red", overflow="ellipsis", no_wrap=True) for line in self.recent]
        head = Text(f"{head}  time left {duration(driver.time_left())}")
        return Group(Text(f"batch {driver.plan.id}", style="bold"), head, runs, *failures)

    def row(self, account) -> list[str]:
        from dendritic_lab.fleet.watch import last_progress
        line, number = last_progress(account.folder), f"{account.cell[0]}/{account.cell[1]}"
        done = f"{line['task']} {line['done']}/{line['total']}" if line else ""
        seconds = time.monotonic() - account.started
        return [str(account.run), number, done, figures(line) if line else "", duration(seconds)]
