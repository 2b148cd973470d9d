"""The site builds, its links lead somewhere, and a browser shows it without a network."""

import functools
import http.server
import importlib.resources
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from dendritic_lab.lab.publish import MARKED, stage, update_readme, write_parts
from dendritic_lab.lab.reference import plain_modules
from dendritic_lab.lab.report import external_loads
from dendritic_lab.lab.results import AGAIN

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


ROOT = Path(__file__).resolve().parents[1]
SHOWN = """
import numpy as np, pandas as pd, matplotlib.pyplot as plt
from dendritic_lab.lab.record import begin
from dendritic_lab.measure import plot_intervals
recorder = begin("shown", system="dsn")
recorder.dataset({"name": "sst2", "data": "sst2", "source": "embedded", "rows": {"test": 300}, "sha256": {}})
""", """
right = np.random.default_rng(0).random((3, 300)) < 0.8
here = {"data": "sst2", "model": "DSN", "size": "0.49 M"}
accuracy = recorder.accuracy("shown.accuracy", right, claims=["dsn.accuracy"], where=here, headline=True)
other = recorder.accuracy("shown.other", right[:, :200], claims=["dsn.baseline_accuracy"], where=here)
figure, axis = plt.subplots(figsize=(5, 3))
plot_intervals(axis, range(2), [accuracy, other])
recorder.figure(figure, "accuracy", "Accuracy with 95 % intervals over seeds and sentences.")
""", """
pd.DataFrame({"sentence": range(30), "right": right[0, :30]})
""", """
recorder.conclude(f"Coins are right in {accuracy:.1f} % of all sentences.", figure="accuracy", verdict="does not hold", limits="Coins.",
                  table=pd.DataFrame({"arm": ["coin"], "accuracy, %": [f"{accuracy:.1f}"]}), compared_with="a better coin")
"""


def write_experiment(root: Path, name: str, *cells: str):
    "An experiment's notebook and profiles."
    told = [new_markdown_cell(f"# {name.capitalize()}\n\n> Does it show?"),
            new_code_cell("seed: int = 0  # of the coins", metadata={"tags": ["parameters"]})]
    notebook = new_notebook(cells=[*told, *map(new_code_cell, cells)],
                            metadata={"kernelspec": {"name": "python3", "display_name": "python3", "language": "python"}})
    nbformat.write(notebook, root / f"nbs/experiments/{name}.ipynb")


def add_reference(root: Path, name: str) -> Path:
    "Run an experiment and keep the run as its run of record."
    command = [Path(sys.executable).parent / "dendritic-lab", "run", name, "--profile", "smoke"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    run, = (p for p in (root / "outputs" / name).glob("2*") if p.suffix == "")
    return shutil.copytree(run, root / "outputs/reference" / name / run.name)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    "A copy of what the site is made of, with one experiment and its run of record more."
    copy, unwanted = tmp_path_factory.mktemp("site"), shutil.ignore_patterns(".ipynb_checkpoints", "__pycache__")
    for name in ("nbs", "outputs/reference", "dendritic_lab", "kernels"):
        if (ROOT / name).exists(): shutil.copytree(ROOT / name, copy / name, ignore=unwanted)
    for name in ("settings.ini", "index.qmd", "LOG.md"): shutil.copy(ROOT / name, copy)
    (copy / "_quarto.yml").write_text((ROOT / "_quarto.yml").read_text().replace(".venv/bin", str(Path(sys.executable).parent)))
    write_experiment(copy, "shown", *SHOWN)
    add_reference(copy, "shown")
    return copy


@pytest.fixture(scope="module")
def site(checkout) -> Path:
    "The site, built by smalldocs."
    done = subprocess.run([Path(sys.executable).parent / "smalldocs", "render"], cwd=checkout, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return checkout / "_site"


class Links(HTMLParser):
    "Addresses that a page points to, and the ids it has."
    def __init__(self, page: str):
        super().__init__()
        self.links, self.ids = [], set()
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name in ("href", "src") and value: self.links.append(value)
            if name == "id": self.ids.add(value)


def test_no_internal_link_is_broken(site):
    pages = {p: Links(p.read_text(encoding="utf-8")) for p in site.rglob("*.html")}
    broken = []
    for page, found in pages.items():
        for link in found.links:
            if re.match(r"[a-z]+:|//", link): continue
            path, fragment = urldefrag(unquote(link.partition("?")[0]))
            target = page if not path else (site / path.lstrip("/") if path.startswith("/") else page.parent / path).resolve()
            if target.is_dir(): target /= "index.html"
            if not target.exists(): broken.append(f"{page.relative_to(site)} -> {link}")
            elif fragment and target in pages and fragment not in pages[target].ids and fragment != "top": broken.append(f"{page.relative_to(site)} -> {link}")
    assert len(pages) > 15 and broken == []


def test_every_notebook_and_the_claims_have_a_page(site, root):
    notebooks = [p.relative_to(root / "nbs") for p in (root / "nbs").rglob("*.ipynb") if not {"experiments", "tutorials", "explorers"} & set(p.parts) and p.name != "launcher.ipynb" and ".ipynb_checkpoints" not in p.parts]
    for path in notebooks: assert (site / "docs/library" / path.parent / (re.sub(r"^\d+_", "", path.stem) + ".html")).exists(), path
    for path in (root / "nbs/tutorials").glob("[!.]*.ipynb"): assert (site / "docs/tutorials" / (re.sub(r"^\d+_", "", path.stem) + ".html")).exists(), path
    for path in plain_modules(root): assert (site / "docs/library" / path.parent.name / f"{path.stem}.html").exists(), path
    claims = (site / "docs/claims.html").read_text()
    assert "dsn.accuracy" in claims and "inconsistent" in claims


@pytest.mark.parametrize("file", ["README.md", "kernels/README.md"])
def test_readme_shows_what_the_runs_of_record_say(root, file):
    text = (root / file).read_text(encoding="utf-8")
    assert MARKED.search(text)
    assert write_parts(text, root, "../" * file.count("/")) == text, "run: make readme"


def test_readme_is_short(root):
    assert len(MARKED.sub("", (root / "README.md").read_text(encoding="utf-8")).split()) <= 800


def test_an_experiment_is_added_in_one_place(checkout, tmp_path):
    for name in ("settings.ini", "LOG.md"): shutil.copy(checkout / name, tmp_path)
    (tmp_path / "nbs/experiments").mkdir(parents=True)
    (tmp_path / "README.md").write_text("# Read me\n\n<!-- results: written by `make readme` -->\n\n<!-- /results -->\n")
    write_experiment(tmp_path, "shown", *SHOWN)
    stage(tmp_path)
    assert update_readme(tmp_path) and f"*Shown*: {AGAIN}" in (tmp_path / "README.md").read_text()
    assert AGAIN in (tmp_path / "docs/experiments.qmd").read_text()
    run = add_reference(tmp_path, "shown")
    stage(tmp_path)
    assert update_readme(tmp_path) and not update_readme(tmp_path)
    row = next(line for line in (tmp_path / "README.md").read_text().splitlines() if "[shown]" in line)
    expected = ("Dsn", "Coins are right in", "**does not hold**", "shown accuracy 7", f"outputs/reference/shown/{run.name}/report.html")
    assert [words for words in expected if words not in row] == []
    page, claims = ((tmp_path / "docs" / name).read_text() for name in ("experiments.qmd", "claims.qmd"))
    expected = ("{#shown}", "figures/shown.png", "Limits: Coins.", "a better coin", "| coin |", f"reports/shown-{run.name}.html")
    assert [words for words in expected if words not in page] == []
    assert claims.count(f"reports/shown-{run.name}.html") == 2 and (tmp_path / "docs/figures/shown.png").exists()


def test_a_report_begins_with_its_verdict_and_folds_long_tables(checkout):
    report = next((checkout / "outputs/reference/shown").glob("*/report.html")).read_text()
    order = ["Does it show?", "Coins are right", "Verdict: does not hold.", "<img ", "Coins.", "Table of 30 rows", "Claims that this run speaks to"]
    places = [report.index(words) for words in order]
    assert places == sorted(places)


def said_by_experiments(root: Path) -> set[str]:
    "Names of the experiments and of the figures that they record."
    names = {p.stem for p in (root / "nbs/experiments").glob("*.ipynb")}
    for path in (root / "nbs/experiments").glob("*.ipynb"):
        code = "".join(line for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code" for line in [*c["source"], "\n"])
        names |= set(re.findall(r"""recorder\.(?:metric|accuracy|items|ratio)\(\s*"([a-z0-9_.]+)\"""", code))
    for path in (root / "outputs/reference").rglob("metrics.json"): names |= {m["name"] for m in json.loads(path.read_text())["metrics"]}
    return names


def test_no_module_of_the_lab_knows_an_experiment(root):
    modules = [p for folder in ("lab", "fleet", "cli") for p in (root / "dendritic_lab" / folder).rglob("*.py")]
    names = said_by_experiments(root)
    assert len(names) > 20
    known = re.compile(r"(?<![\w./])(" + "|".join(map(re.escape, sorted(names, key=len, reverse=True))) + r")(?![\w.]*\w)")
    assert {(p.name, found) for p in modules for found in known.findall(p.read_text(encoding="utf-8"))} == set()


def test_reference_runs_are_complete_and_self_contained(checkout):
    runs = [p.parent for p in (checkout / "outputs/reference").rglob("metrics.json")]
    assert runs
    for run in runs:
        assert {p.name for p in run.iterdir()} >= {
            "metrics.json", "summary.json", "params.yaml", "environment.json", "report.html", "report.ipynb", "status"}
        assert not external_loads((run / "report.html").read_text(encoding="utf-8"))
        assert (run / "report.html").stat().st_size < 3_000_000


@pytest.fixture
def serve(site):
    "The address of the site on this machine."
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=site)
    handler.log_message = lambda *words: None
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture
def browser(serve):
    "A page of a real browser, and what went wrong there: errors on the console, requests to other hosts, pictures that are not there."
    from playwright.sync_api import sync_playwright
    with sync_playwright() as playwright:
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=[*options, "--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"])
        page, wrong = started.new_page(viewport={"width": 380, "height": 800}), []
        page.on("console", lambda m: wrong.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda e: wrong.append(str(e)))
        page.on("request", lambda r: wrong.append(r.url) if not r.url.startswith((serve, "data:", "blob:")) else None)
        yield page, wrong
        started.close()


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium")


@pytest.mark.browser
@needs_chromium
def test_a_browser_shows_every_page_on_a_phone_without_errors_or_other_hosts(serve, site, browser):
    page, wrong = browser
    for path in sorted(str(p.relative_to(site)) for p in site.rglob("*.html")):
        page.goto(f"{serve}/{path}")
        assert page.locator("h1").first.is_visible(), path
        assert page.evaluate("document.documentElement.scrollWidth") <= 380, f"{path} is wider than a phone"
        assert page.evaluate("[...document.images].filter(i => i.complete && !i.naturalWidth).length") == 0, f"{path} has a picture that does not load"
        assert page.evaluate("[...document.images].filter(i => !i.alt).length") == 0, f"{path} has a picture without an alternative text"
    assert wrong == []


@pytest.mark.browser
@needs_chromium
@pytest.mark.parametrize("mode", ["light", "dark"])
def test_pages_have_no_serious_accessibility_violation(serve, site, browser, mode):
    axe = importlib.resources.files("axe_playwright_python").joinpath("axe.min.js").read_text()
    page, _ = browser
    page.emulate_media(color_scheme=mode)
    report = min(str(p.relative_to(site)) for p in site.glob("docs/reports/*.html"))
    for path in ["index.html", "docs/start.html", "docs/concepts.html", "docs/claims.html", "docs/experiments.html", "docs/kernels.html", "docs/tutorials/dsn.html", "docs/library/layers/perforation.html", "docs/library/dendritic_kernels/attention.html", report]:
        page.goto(f"{serve}/{path}")
        page.evaluate(axe)
        found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
        assert [(v["id"], v["nodes"][0]["html"][:200]) for v in found if v["impact"] in ("serious", "critical")] == [], path


@pytest.mark.browser
@needs_chromium
def test_navigation_search_and_sorting_work(serve, browser):
    page, wrong = browser
    page.set_viewport_size({"width": 1200, "height": 900})
    page.goto(f"{serve}/index.html")
    assert page.locator(".finding").count() == 5 and page.locator(".finding img").count() >= 1
    page.get_by_role("link", name="Claims").first.click()
    page.wait_for_url("**/docs/claims.html")
    column = lambda: page.locator("main table").first.locator("tbody tr td:nth-child(3)").all_inner_texts()
    page.get_by_role("button", name="status").click()
    assert column() == sorted(column()) and len(set(column())) > 1
    page.get_by_role("button", name="status").click()
    assert column() == sorted(column(), reverse=True)
    page.get_by_label("status").select_option("inconsistent")
    shown = page.locator("table.claims tbody tr:not(.more):visible")
    assert {row.get_attribute("data-status") for row in shown.all()} == {"inconsistent"}
    assert page.locator(".filter output").inner_text() == f"{shown.count()} claims"
    page.locator(".smalldocs-search input").first.fill("DendriticLinear")
    page.locator(".search-result").first.click()
    page.wait_for_url("**/dendritic_linear.html*")
    assert wrong == []
