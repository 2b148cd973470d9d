"""The `dendritic-lab` command. It parses what was asked for and prints what came of it; `lab` and `fleet` do the work.

Modules are imported inside the commands, so `dendritic-lab --help` answers at once.

Exit codes: 0 it worked; 1 it was tried and failed; 2 what was asked for cannot be; 130 it was interrupted.
"""

import typer

from dendritic_lab.cli import checkout, many, runs

app = typer.Typer(
    name="dendritic-lab", no_args_is_help=True, add_completion=False, rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Run experiments on neural networks inspired by dendrites, and compare them with what was claimed.")
for module in (checkout, runs, many): app.registered_commands += module.app.registered_commands
for module in (checkout,): app.registered_groups += module.app.registered_groups


def main():
    "Entry point of the `dendritic-lab` command."
    app()
