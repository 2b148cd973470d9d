"""Set before anything imports torch or Triton: what each of the suite's workers may use, and what it may read.

One thread for each worker; without a GPU, Triton's kernels run in its interpreter, which must be chosen before anything
imports Triton. A fresh clone must pass as it is, so no test sees the user's own data: only those marked `local` read
the folder that `DENDRITIC_LAB_DATA` names, and get it from their fixture. A shell that starts the suite in the
background lets it ignore Ctrl-C, and so would the programs that tests interrupt.
"""

import os
import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN: signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("OMP_NUM_THREADS", "1")
LOCAL = "DENDRITIC_LAB_LOCAL_TESTS"  # the workers' processes inherit it
if folder := os.environ.pop("DENDRITIC_LAB_DATA", ""): os.environ[LOCAL] = os.path.abspath(folder)

import pytest  # noqa: E402
import torch  # noqa: E402

if not torch.cuda.is_available(): os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def users_data(request):
    "`DENDRITIC_LAB_DATA` is set for tests that are marked `local`, and for no other."
    if not request.node.get_closest_marker("local"): return
    if LOCAL not in os.environ: pytest.skip("DENDRITIC_LAB_DATA is not set")
    request.getfixturevalue("monkeypatch").setenv("DENDRITIC_LAB_DATA", os.environ[LOCAL])
