"""The site builds, its links lead somewhere, and a browser shows it without a network."""

import ast
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
from dendritic_lab.lab.reference import code_of, notebooks, plain_modules
from dendritic_lab.lab.report import FORMULA, external_loads
from dendritic_lab.lab.results import AGAIN
from dendritic_lab.lab.tutorials import executed_copy

pytestmark = pytest.mark.xdist_group("site")  # one worker: what its tests share is made once

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
pd.DataFrame({"texts": [59376], "share": [0.51234]})
""", """
pd.DataFrame({"sentence": range(30), "right": right[0, :30]})
""", """
pd.DataFrame({f"column {i}": ["words that are long"] for i in range(12)})
""", """
figure, axis = plt.subplots(figsize=(14, 3))
axis.plot([1, 2], [1, 2])
recorder.figure(figure, "wide", "A figure that is wider than the page, \\"quoted\\".")
""", """
table = pd.DataFrame({"arm": ["coin"], "accuracy, %": [f"{accuracy:.1f}"]})
recorder.conclude(f"Coins are right in {accuracy:.1f} % of all sentences.", figure="accuracy", table=table,
                  verdict="does not hold", compared_with="a better coin", limits="Coins.", judged="the coin is fair")
"""


def write_experiment(root: Path, name: str, *cells: str):
    "An experiment's notebook and profiles."
    told = [new_markdown_cell(f"# {name.capitalize()}\n\n> Does it show?\n\nAs $p_i = 0.8$, or\n\n$$p = \\sum_i p_i$$"),
            new_code_cell("seed: int = 0  # of the coins", metadata={"tags": ["parameters"]})]
    kernel = {"name": "python3", "display_name": "python3", "language": "python"}
    notebook = new_notebook(cells=[*told, *map(new_code_cell, cells)], metadata={"kernelspec": kernel})
    nbformat.write(notebook, root / f"nbs/experiments/{name}.ipynb")


def add_reference(root: Path, name: str) -> Path:
    "Run an experiment and keep the run as its run of record."
    command = [Path(sys.executable).parent / "dendritic-lab", "run", name, "--profile", "smoke"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    run, = (p for p in (root / "outputs" / name).glob("2*") if p.suffix == "")
    return shutil.copytree(run, root / "outputs/reference" / name / run.name)


def count_as_run(tutorial: Path, root: Path):
    "Give a tutorial an executed copy without outputs. test_notebooks.py runs it; the site runs only its first."
    copy = executed_copy(tutorial, root)
    copy.parent.mkdir(parents=True)
    shutil.copy(tutorial, copy)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    "A copy of what the site is made of, with one experiment and its run of record more."
    copy, unwanted = tmp_path_factory.mktemp("site"), shutil.ignore_patterns(".ipynb_checkpoints", "__pycache__")
    for name in ("nbs", "outputs/reference", "dendritic_lab", "kernels"):
        if (ROOT / name).exists(): shutil.copytree(ROOT / name, copy / name, ignore=unwanted)
    for name in ("settings.ini", "index.qmd", "LOG.md"): shutil.copy(ROOT / name, copy)
    told = (ROOT / "_quarto.yml").read_text()
    (copy / "_quarto.yml").write_text(told.replace(".venv/bin", str(Path(sys.executable).parent)))
    write_experiment(copy, "shown", *SHOWN)
    add_reference(copy, "shown")
    for tutorial in notebooks(copy, "tutorials")[1:]: count_as_run(tutorial, copy)
    return copy


@pytest.fixture(scope="module")
def site(checkout) -> Path:
    "The site, built by smalldocs."
    command = [Path(sys.executable).parent / "smalldocs", "render"]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
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


def target_of(page: Path, path: str, site: Path) -> Path:
    "The file that a link on a page leads to."
    if not path: return page
    target = (site / path.lstrip("/") if path.startswith("/") else page.parent / path).resolve()
    return target / "index.html" if target.is_dir() else target


def test_no_internal_link_is_broken(site):
    pages = {p: Links(p.read_text(encoding="utf-8")) for p in site.rglob("*.html")}
    broken = []
    for page, link in ((page, link) for page, found in pages.items() for link in found.links):
        if re.match(r"[a-z]+:|//", link): continue
        path, fragment = urldefrag(unquote(link.partition("?")[0]))
        target = target_of(page, path, site)
        known = target not in pages or fragment in ("", "top") or fragment in pages[target].ids
        if not target.exists() or not known: broken.append(f"{page.relative_to(site)} -> {link}")
    assert len(pages) > 15 and broken == []


def test_every_notebook_and_the_claims_have_a_page(site, root):
    found = [p.relative_to(root / "nbs") for p in (root / "nbs").rglob("[!.]*.ipynb")]
    others = {"experiments", "explorers", "launcher.ipynb", ".ipynb_checkpoints"}
    shown = [p for p in found if not others & set(p.parts)]
    page = lambda p: p.parent / re.sub(r"^\d+_", "", p.stem)
    pages = [str(page(p)) if p.parts[0] == "tutorials" else f"library/{page(p)}" for p in shown]
    pages += [f"library/{p.parent.name}/{p.stem}" for p in plain_modules(root)]
    assert len(pages) > 50 and [page for page in pages if not (site / "docs" / f"{page}.html").exists()] == []
    claims = (site / "docs/claims.html").read_text()
    assert "dsn.accuracy" in claims and "inconsistent" in claims


@pytest.mark.parametrize("file", ["README.md", "kernels/README.md"])
def test_readme_shows_what_the_runs_of_record_say(root, file):
    text = (root / file).read_text(encoding="utf-8")
    assert MARKED.search(text)
    assert write_parts(text, root, "../" * file.count("/")) == text, "run: make readme"


def test_readme_is_short(root):
    assert len((root / "README.md").read_text(encoding="utf-8").split()) <= 1200


def test_an_experiment_is_added_in_one_place(checkout, tmp_path):
    for name in ("settings.ini", "LOG.md"): shutil.copy(checkout / name, tmp_path)
    (tmp_path / "nbs/experiments").mkdir(parents=True)
    marked = "# Read me\n\n<!-- results: written by `make readme` -->\n\n<!-- /results -->\n"
    (tmp_path / "README.md").write_text(marked)
    write_experiment(tmp_path, "shown", *SHOWN)
    stage(tmp_path)
    assert update_readme(tmp_path) and f"*Shown*: {AGAIN}" in (tmp_path / "README.md").read_text()
    assert AGAIN in (tmp_path / "docs/experiments.qmd").read_text()
    run = add_reference(tmp_path, "shown")
    stage(tmp_path)
    assert update_readme(tmp_path) and not update_readme(tmp_path)
    row = next(line for line in (tmp_path / "README.md").read_text().splitlines() if "[shown]" in line)
    address = f"outputs/reference/shown/{run.name}/report.html"
    expected = ("Dsn", "Coins are right in", "the coin is fair: **does not hold**", address)
    assert [words for words in expected if words not in row] == []
    page, claims = ((tmp_path / "docs" / name).read_text() for name in ("experiments.qmd", "claims.qmd"))
    address = f"reports/shown-{run.name}.html"
    expected = ("{#shown}", "figures/shown.png", "Limits: Coins.", "a better coin", "| coin |", address)
    assert [words for words in expected if words not in page] == []
    assert claims.count(address) == 2 and (tmp_path / "docs/figures/shown.png").exists()


def test_a_report_begins_with_its_verdict_and_folds_long_tables(checkout):
    report = next((checkout / "outputs/reference/shown").glob("*/report.html")).read_text()
    order = ["Does it show?", "Coins are right", "Verdict: the coin is fair: does not hold.", "<img ", "Coins.",
             "<table", "59,376", "Table of 30 rows", "Table of 1 row: column 0", "Claims that this run speaks to"]
    places = [report.index(words) for words in order]
    assert places == sorted(places)


class Pictures(HTMLParser):
    "Figures of a page: each one's id and its picture's alternative text."
    def __init__(self, page: str):
        super().__init__()
        self.ids, self.texts = [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        if tag == "figure": self.ids.append(dict(attributes)["id"])
        if tag == "img": self.texts.append(dict(attributes).get("alt", ""))


def test_a_report_shows_each_figure_once_with_a_text(checkout):
    report = next((checkout / "outputs/reference/shown").glob("*/report.html")).read_text()
    found = Pictures(report)
    assert found.ids == ["figure-accuracy", "figure-wide"] and "further up" in report
    assert found.texts == ["Accuracy with 95 % intervals over seeds and sentences.",
                           'A figure that is wider than the page, "quoted".']


def test_a_report_has_numbers_for_people(checkout):
    report = next((checkout / "outputs/reference/shown").glob("*/report.html")).read_text()
    assert '<td class="number">59,376</td><td class="number">0.512</td>' in report


def test_a_tutorial_shows_what_it_did_and_nothing_of_the_machine_but_its_name(site, checkout):
    page = (site / "docs/tutorials/dsn.html").read_text(encoding="utf-8")
    assert re.search(r"\d \[\d+\.\d, \d+\.\d\] % of 300 test sentences right", page) and "dataframe" in page
    unwanted = ("it/s", "Loading weights", "Warning", str(ROOT), str(checkout), sys.prefix)
    assert [words for words in unwanted if words in page] == [] and "one run on" in page


def test_the_sidebar_is_in_reading_order(site, root):
    links = Links((site / "docs/tutorials.html").read_text(encoding="utf-8")).links
    shown = list(dict.fromkeys(Path(link).stem for link in links if "tutorials/" in link))
    stem = lambda path: re.sub(r"^\d+_", "", path.stem)
    assert shown == [stem(p) for p in sorted((root / "nbs/tutorials").glob("[0-9]*.ipynb"))]
    links = Links((site / "docs/library/lab/experiments.html").read_text(encoding="utf-8")).links
    lessons = [Path(link).stem for link in links if "/training/" in link]
    assert lessons == [stem(p) for p in sorted((root / "nbs/training").glob("[0-9]*.ipynb"))]


def said_by_experiments(root: Path) -> set[str]:
    "Names of the experiments and of the figures that they record."
    recorded = re.compile(r"""recorder\.(?:metric|accuracy|items|ratio)\(\s*"([a-z0-9_.]+)\"""")
    experiments = list((root / "nbs/experiments").glob("*.ipynb"))
    names = {p.stem for p in experiments} | {name for p in experiments for name in recorded.findall(code_of(p))}
    records = [json.loads(p.read_text()) for p in (root / "outputs/reference").rglob("metrics.json")]
    return names | {m["name"] for record in records for m in record["metrics"]}


def words_of(module: Path) -> set[str]:
    "The texts in a module's code. Prose, which may give examples, has spaces and is left out."
    nodes = ast.walk(ast.parse(module.read_text(encoding="utf-8")))
    texts = {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str) and " " not in n.value}
    return {word for text in texts for word in (text, *text.split("/"))}


def test_no_module_of_the_lab_knows_an_experiment(root):
    modules = [p for folder in ("lab", "fleet", "cli") for p in (root / "dendritic_lab" / folder).rglob("*.py")]
    names = said_by_experiments(root)
    assert len(names) > 20 and len(modules) > 20
    assert {(p.name, word) for p in modules for word in words_of(p) & names} == set()


class Prose(HTMLParser):
    "The text of a page outside of code, and how many formulas are drawn on it."
    def __init__(self, page: str):
        super().__init__()
        self.text, self.formulas, self.within = "", 0, []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.formulas += tag == "math"
        if tag in ("pre", "code", "script", "style"): self.within.append(tag)

    def handle_endtag(self, tag):
        if self.within and tag == self.within[-1]: self.within.pop()

    def handle_data(self, data):
        if not self.within: self.text += data


def test_formulas_are_drawn_without_a_network(site, checkout):
    reports = list((checkout / "outputs/reference").glob("*/*/report.html"))
    pages = {p: Prose(p.read_text(encoding="utf-8")) for p in [*site.rglob("*.html"), *reports]}
    source = re.compile(FORMULA.pattern + r"|\\(?:frac|sum|odot|mathrm|text|begin)\b", re.DOTALL)
    assert {p.name: found[0] for p, page in pages.items() if (found := source.search(page.text))} == {}
    assert all(pages[p].formulas >= 2 for p in reports if p.parts[-3] == "shown")
    assert pages[site / "docs/library/layers/dendritic_linear.html"].formulas > 5


KEPT = {"metrics.json", "summary.json", "params.yaml", "environment.json", "report.html", "report.ipynb", "status"}


def test_reference_runs_are_complete_and_self_contained(checkout):
    runs = [p.parent for p in (checkout / "outputs/reference").rglob("metrics.json")]
    assert runs
    for run in runs:
        missing = KEPT - {p.name for p in run.iterdir()}
        assert not missing, run
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
    "A page of a real browser, and what went wrong there: errors on the console, requests to other hosts."
    from playwright.sync_api import sync_playwright
    with sync_playwright() as playwright:
        options = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"]
        options += ["--no-sandbox"] if os.geteuid() == 0 else []
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        page, wrong = started.new_page(viewport={"width": 380, "height": 800}), []
        page.on("console", lambda m: wrong.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda e: wrong.append(str(e)))
        own = (serve, "data:", "blob:")
        page.on("request", lambda r: None if r.url.startswith(own) else wrong.append(r.url))
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
        broken = "[...document.images].filter(i => i.complete && !i.naturalWidth).length"
        assert page.evaluate(broken) == 0, f"{path} has a picture that does not load"
        silent = "[...document.images].filter(i => !i.alt).length"
        assert page.evaluate(silent) == 0, f"{path} has a picture without an alternative text"
        cut = "[...document.querySelectorAll('table.claims')].filter(t => t.scrollWidth > t.clientWidth).length"
        assert page.evaluate(cut) == 0, f"{path} has a table of claims that is cut off"
    assert wrong == []


LOOKED_AT = [
    "index.html", "docs/start.html", "docs/concepts.html", "docs/claims.html", "docs/experiments.html",
    "docs/kernels.html", "docs/tutorials/dsn.html", "docs/library/layers/perforation.html",
    "docs/library/dendritic_kernels/attention.html"]


@pytest.mark.browser
@needs_chromium
@pytest.mark.parametrize("mode", ["light", "dark"])
def test_pages_have_no_serious_accessibility_violation(serve, site, browser, mode):
    axe = importlib.resources.files("axe_playwright_python").joinpath("axe.min.js").read_text()
    page, _ = browser
    page.emulate_media(color_scheme=mode)
    report = min(str(p.relative_to(site)) for p in site.glob("docs/reports/*.html"))
    for path in [*LOOKED_AT, report]:
        page.goto(f"{serve}/{path}")
        page.evaluate(axe)
        found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
        serious = [(v["id"], v["nodes"][0]["html"][:200], v["nodes"][0]["failureSummary"])
                   for v in found if v["impact"] in ("serious", "critical")]
        assert serious == [], path


@pytest.mark.browser
@needs_chromium
def test_navigation_search_and_sorting_work(serve, browser):
    page, wrong = browser
    page.set_viewport_size({"width": 1200, "height": 900})
    page.goto(f"{serve}/index.html")
    assert page.locator(".finding").count() == 5 and page.locator(".finding img").count() >= 1
    pictures = page.locator(".finding :is(img, svg)")
    assert pictures.count() == 5 and all(box.bounding_box()["width"] > 200 for box in pictures.all())
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
