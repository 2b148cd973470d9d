"""Without a GPU, Triton's kernels run in its interpreter, which must be chosen before anything imports Triton."""

import os

import torch

if not torch.cuda.is_available(): os.environ["TRITON_INTERPRET"] = "1"
