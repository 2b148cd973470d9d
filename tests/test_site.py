"""The site builds, its links lead somewhere, and a browser shows it without a network."""

import functools
import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

from dendritic_lab.lab.report import external_loads
from dendritic_lab.lab.site import TABLES, between

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    "The site, built by smalldocs from a copy of what it is made of."
    root, copy = Path(__file__).resolve().parents[1], tmp_path_factory.mktemp("site")
    for name in ("nbs", "pages", "outputs/reference", "dendritic_lab/lab"): shutil.copytree(root / name, copy / name, ignore=shutil.ignore_patterns(".ipynb_checkpoints", "__pycache__"))
    for name in ("settings.ini", "index.qmd", "LOG.md"): shutil.copy(root / name, copy)
    (copy / "_quarto.yml").write_text((root / "_quarto.yml").read_text().replace(".venv/bin", str(Path(sys.executable).parent)))
    done = subprocess.run([Path(sys.executable).parent / "smalldocs", "render"], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return copy / "_site"


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
    claims = (site / "docs/claims.html").read_text()
    assert "dsn.accuracy" in claims and "inconsistent" in claims


@pytest.mark.parametrize("name", TABLES)
def test_readme_shows_the_reference_figures(root, name):
    file, table = TABLES[name]
    assert between(name, (root / file).read_text(encoding="utf-8"))[1] == table(root), "run: make readme"


def test_reference_runs_are_complete_and_self_contained(root):
    runs = [p.parent for p in (root / "outputs/reference").rglob("metrics.json")]
    assert runs
    for run in runs:
        assert {p.name for p in run.iterdir()} >= {"metrics.json", "params.yaml", "environment.json", "report.html", "report.ipynb", "status"}
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


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium")
def test_a_browser_shows_pages_and_reports_without_errors_or_other_hosts(serve, site):
    from playwright.sync_api import sync_playwright
    reports = [str(p.relative_to(site)) for p in site.glob("docs/reports/*.html")]
    with sync_playwright() as playwright:
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=[*options, "--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"])
        page = browser.new_page(viewport={"width": 380, "height": 800})
        errors, elsewhere = [], []
        page.on("console", lambda m: errors.append(m.text) if m.type == "error" and "favicon.ico" not in m.location["url"] else None)
        page.on("pageerror", lambda e: errors.append(str(e)))
        page.on("request", lambda r: elsewhere.append(r.url) if not r.url.startswith((serve, "data:", "blob:")) else None)
        for path in ["index.html", "docs/claims.html", "docs/experiments.html", "docs/library/layers/dendritic_linear.html", *reports]:
            page.goto(f"{serve}/{path}")
            assert page.locator("h1").first.is_visible(), path
        browser.close()
    assert errors == [] and elsewhere == []
