"""Runs as tasks of Ray (https://docs.ray.io), on one machine or many. It is optional: extra `cluster`.

Each run is a task in a fresh process. Where the other machine does not see the folder of the runs, the finished
folder comes back as an archive.

On a cluster with Slurm, `slurm/ray_batch.sh` beside this file starts Ray on all nodes of a job and hands it a batch.
Submitted again with `--resume` after the time limit, it runs what is missing. Ray's token authentication stays on;
the script makes a token for the job.
"""

import io
import os
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from dendritic_lab.extras import MissingExtra, optional
from dendritic_lab.fleet.engine import Event, Request, Resources
from dendritic_lab.fleet.recovery import mark_failed, marked_runs
from dendritic_lab.fleet.worker import work
from dendritic_lab.lab.experiments import UsageError

NOT_SHIPPED = ["/outputs/", "/.git/", "/.venv/", "/_site/", "/docs/"]
VARIABLES = ("PYTHONPATH", "DENDRITIC_LAB_DATA", "HF_HUB_OFFLINE")  # that tasks on this machine get


def work_anywhere(
    request: Request,
    relative: str,  # path of the notebook in the checkout, for machines that have another one
    cpus: int,
    token: str,
    seen: str,  # a file that holds `token` where the folder of the runs is shared
) -> dict:  # the last event; with `archive` and `name` where the folder is not shared
    "What a Ray task does."
    if not Path(request["notebook"]).exists(): request = {**request, "notebook": str(Path.cwd() / relative)}
    os.environ["OMP_NUM_THREADS"] = str(cpus)
    with suppress(OSError):
        if Path(seen).read_text() == token: return work(request, lambda event: None)
    with tempfile.TemporaryDirectory() as folder:
        last = work({**request, "out": folder}, lambda event: None)
        if not last["folder"]: return last
        made, packed = Path(last["folder"]), io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as tar: tar.add(made, made.name)
        return {**last, "archive": packed.getvalue(), "name": f"{made.parent.name}/{made.name}"}


def unpack(event: dict, out: Path) -> Event:
    "Put a run that came back into the folder of the runs, under its final name only when all of it is there."
    packed, name = event.pop("archive", None), event.pop("name", None)
    if packed is None: return event
    target = Path(out) / name
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".arriving-") as folder:
        with tarfile.open(fileobj=io.BytesIO(packed)) as tar: tar.extractall(folder, filter="data")
        Path(folder, target.name).rename(target)
    return {**event, "folder": str(target)}


class RayEngine:
    "Ray tasks; an `Engine`. Raises `UsageError` when Ray is not installed, does not start or cannot be reached."

    def __init__(self,
        address: str | None,  # None: start Ray on this machine
        token: str,
        seen: Path,  # holds `token`
        root: Path,  # the checkout
        most: int | None = None,  # runs at a time; None: as many as the cluster's resources allow
    ):
        try: ray = optional("ray", "the engine ray")
        except MissingExtra as e: raise UsageError(str(e)) from None
        self.ray, self.token, self.seen, self.root, self.most = ray, token, str(seen), root, most
        if address: runtime = {"working_dir": str(root), "excludes": NOT_SHIPPED}
        else: runtime = {"env_vars": {k: os.environ[k] for k in VARIABLES if k in os.environ}}
        try: ray.init(address=address, runtime_env=runtime, log_to_driver=False, configure_logging=False,
                      include_dashboard=None if address else False)
        except Exception as e:  # Ray raises bare Exceptions
            what = f"reach Ray at {address}" if address else "start Ray"
            raise UsageError(f"cannot {what}: {str(e).strip().splitlines()[0]}") from e
        self.task, self.running = ray.remote(max_retries=0, max_calls=1)(work_anywhere), {}

    @property
    def workers(self) -> int: return self.most or max(1, len(self.running))

    def refusal(self, wanted: Resources) -> str | None:
        total = self.ray.cluster_resources()
        for name, number in (("CPU", wanted.cpus or 1), ("GPU", wanted.gpus or 0)):
            available = total.get(name, 0)
            if number > available: return f"{number:g} {name.lower()}s are asked for; the cluster has {available:g}"
        return None

    def submit(self, request: Request, wanted: Resources) -> bool:
        if self.most and len(self.running) >= self.most: return False
        cpus, gpus = wanted.cpus or 1, wanted.gpus
        if gpus is None: gpus = min(1, self.ray.cluster_resources().get("GPU", 0))
        relative = str(Path(request["notebook"]).relative_to(self.root))
        task = self.task.options(num_cpus=cpus, num_gpus=gpus)
        self.running[task.remote(request, relative, cpus, self.token, self.seen)] = request
        return True

    def events(self, timeout: float) -> Iterator[Event]:
        if not self.running: return
        for reference in self.ray.wait(list(self.running), num_returns=1, timeout=timeout)[0]:
            request = self.running.pop(reference)
            try: yield unpack(self.ray.get(reference), Path(request["out"]))
            except self.ray.exceptions.RayError as e:
                yield self._failed(request, f"Ray: {str(e).strip().splitlines()[0]}")

    def stop(self, key: str, reason: str) -> Iterator[Event]:
        for reference, request in list(self.running.items()):
            if request["key"] != key: continue
            self.ray.cancel(reference, force=True)
            del self.running[reference]
            yield self._failed(request, reason)

    def _failed(self, request: Request, reason: str) -> Event:
        "A killed task; the folder that it left behind is marked as failed, where it is on a shared disk."
        folder = None
        for found, mark in marked_runs(request["out"], Path(request["notebook"]).stem):
            ours = found.suffix == ".running" and all(mark[k] == request[k] for k in ("identity", "attempt"))
            if ours and folder is None: folder = str(mark_failed(found))
        return {"key": request["key"], "event": "failed", "reason": reason, "folder": folder, "cell": None}

    def close(self):
        for request in list(self.running.values()): list(self.stop(request["key"], "interrupted"))
        self.ray.shutdown()

    def __enter__(self): return self
    def __exit__(self, *error): self.close()
