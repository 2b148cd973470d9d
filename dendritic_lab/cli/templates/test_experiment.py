"""The experiment NAME runs, records its figures and leaves a complete run."""

import json


def test_NAME_runs_in_its_smoke_profile(lab, root, tmp_path):
    done = lab(root, "run", "NAME", "--profile", "smoke", "--data", "embedded", "--out", str(tmp_path), timeout=300)
    assert done.returncode == 0, done.stderr
    run, = (tmp_path / "NAME").iterdir()
    assert (run / "status").read_text().strip() == "complete" and (run / "report.html").exists()
    figures = {m["name"]: m for m in json.loads((run / "metrics.json").read_text())["metrics"]}
    assert 0 <= figures["dendrites.accuracy"]["value"] <= 100 and len(figures["gain.accuracy"]["values"]) == 2
