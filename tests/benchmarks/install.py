"""How long a set of packages takes to install, from nothing, and which packages take longest.

    python tests/benchmarks/install.py --packages demo --out install.json

The commit that is checked out is cloned into a temporary folder, and make installs there what `make demo` would,
with an empty cache of pip and wheels only. A package's download is the time between pip's lines about it and about the
next one; its unpacking is the time between the marks that pip leaves last in each package.
"""

import argparse
import json
import os
import re
import subprocess
import tempfile
import time
from datetime import datetime
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOOKED_FOR = re.compile(r"(\S+) \d+ location\(s\) to search for versions of (\S+):")


def downloads(log: Path) -> dict[str, float]:  # package -> seconds
    "The time from each package's first line in pip's log to the next package's; the last one is left out."
    found = [m.groups() for line in log.read_text().splitlines() if (m := LOOKED_FOR.match(line))]
    starts = [(datetime.fromisoformat(stamp.replace(",", ".")), name) for stamp, name in found]
    return {key(name): (end - start).total_seconds() for (start, name), (end, _) in pairwise(starts)}


def unpacked(packages: Path) -> list[tuple[str, float, float]]:  # package, seconds, MB, in the order of installation
    "What pip installed after the first package, by the marks that it writes last; pip itself came before."
    found = [mark for mark in packages.glob("*.dist-info/INSTALLER") if not mark.parent.name.startswith("pip-")]
    marks = sorted((mark.stat().st_mtime, mark.parent) for mark in found)
    size = lambda info: sum(int(line.rsplit(",", 1)[1] or 0) for line in (info / "RECORD").read_text().splitlines())
    name = lambda info: key(info.name.split("-")[0])
    return [(name(info), end - start, size(info) / 1e6) for (start, _), (end, info) in pairwise(marks)]


def key(name: str) -> str: return re.sub(r"[-_.]+", "-", name).lower()


def install(packages: str) -> dict:
    "Seconds in total and of each package."
    with tempfile.TemporaryDirectory() as folder:
        clone, log = Path(folder, "clone"), Path(folder, "pip.log")
        subprocess.run(["git", "clone", "-q", "--no-hardlinks", ROOT, clone], check=True)
        only_wheels = {"PIP_ONLY_BINARY": ":all:"} if packages == "demo" else {}
        fresh = {"PIP_CACHE_DIR": str(Path(folder, "cache")), "PIP_LOG": str(log), **only_wheels}
        start = time.perf_counter()
        subprocess.run(["make", "-s", f".venv/.installed-{packages}"], cwd=clone, check=True, stdout=subprocess.DEVNULL,
                       env=os.environ | fresh)
        total = time.perf_counter() - start
        fetched, site = downloads(log), next(clone.glob(".venv/lib/python*/site-packages"))
        rows = [{"package": name, "megabytes": size, "download_seconds": fetched.get(name, 0.0), "unpack_seconds": took}
                for name, took, size in unpacked(site) if name in fetched]
        subprocess.run([clone / ".venv/bin/dendritic-lab", "list"], cwd=clone, check=True, stdout=subprocess.DEVNULL)
    return {"packages": packages, "seconds": total, "rows": rows}


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--packages", default="demo", choices=("demo", "lab", "docs", "test"))
    arguments.add_argument("--slowest", type=int, default=15)
    arguments.add_argument("--out", type=Path)
    given = arguments.parse_args()
    done = install(given.packages)
    seconds = lambda row: row["download_seconds"] + row["unpack_seconds"]
    print(f"{given.packages}: {done['seconds']:.0f} s for {len(done['rows'])} packages on {os.cpu_count()} cores")
    print(f"{'package':24}{'MB':>8}{'download':>10}{'unpack':>9}")
    for row in sorted(done["rows"], key=seconds, reverse=True)[:given.slowest]:
        print(f"{row['package']:24}{row['megabytes']:8.1f}{row['download_seconds']:9.1f}s{row['unpack_seconds']:8.1f}s")
    if given.out: given.out.write_text(json.dumps(done, indent=1))


if __name__ == "__main__": main()
