"""Set before anything imports torch or Triton: one thread for each of the suite's workers, and Triton's interpreter.

Without a GPU, Triton's kernels run in its interpreter, which must be chosen before anything imports Triton.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

if not torch.cuda.is_available(): os.environ["TRITON_INTERPRET"] = "1"
