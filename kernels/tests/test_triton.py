"""The Triton kernels: on a GPU where there is one, else in the interpreter; and compiled for GPUs that are missing."""

import subprocess
import sys

import pytest
import torch
from dendritic_kernels import BlockLists, block_sparse_attention
from problems import check, problem

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")  # the interpreter is wrong for bfloat16


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [
    dict(seq=64), dict(seq=70, causal=True, ragged=True, gated=True), dict(seq=33, ragged=True, dim=24),
    dict(seq=48, causal=True, density=1.0), dict(seq=130, dim=64, block=64, heads=1, kv_heads=1, batch=1, gated=True),
    dict(seq=16, gated=True, density=0.0), dict(seq=1, dim=33),
    dict(seq=50, gated=True, density=0.1, heads=3, kv_heads=1), dict(seq=70, padded=True, ragged=True, gated=True),
    dict(seq=90, queries=40, causal=True), dict(seq=90, queries=40, padded=True, gated=True, seed=2),
    dict(seq=90, queries=21, causal=True, padded=True, ragged=True, gated=True, seed=1),
    dict(seq=80, causal=True, padded=True, gated=True, density=0.8),
], ids=str)
def test_agrees_with_the_reference(sizes, dtype): check("triton", device=DEVICE, dtype=dtype, **{"block": 16} | sizes)


def test_layouts():
    "Heads after tokens, also in the gradient: the output is laid out as the queries are."
    q, k, v, mask = (x.to(DEVICE) for x in problem(seq=48, block=16))
    lists = BlockLists.from_mask(mask, 48, 16)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    out, plain = (block_sparse_attention(*turned, lists, backend=backend) for backend in ("triton", "dense"))
    assert out.stride() == turned[0].stride()
    torch.testing.assert_close(out, plain)
    grads = [torch.autograd.grad(x, turned, q) for x in (out, plain)]
    for one, other in zip(*grads): torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_lists_in_one_launch():
    from dendritic_kernels.triton_kernels import build_lists
    for rows, blocks, density in [(1, 1, 1.0), (3, 3, 0.5), (8, 8, 0.0), (2, 5, 0.7), (1, 6, 0.4)]:
        mask = problem(seq=blocks * 8, queries=rows * 8, density=density)[3]
        for layout in (mask, *([mask.transpose(-1, -2)] if rows == blocks else [])):
            lists = BlockLists.from_mask(layout, blocks * 8, 8, rows * 8)
            for source in ((layout.to(DEVICE),), (torch.where(layout, 0.75, float("nan")).to(DEVICE), 0.5),
                           (torch.where(layout, 0.75, 0.5).half().to(DEVICE), 0.5)):
                for built, expected in zip(build_lists(*source),
                                           (lists.row_counts, lists.row_index, lists.col_counts, lists.col_index)):
                    assert torch.equal(built.cpu(), expected)


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_compiles_without_spills(capability):
    "In a process of its own, because the interpreter is chosen at import."
    import os
    done = subprocess.run([sys.executable, "-m", "dendritic_kernels.compile_check", str(capability)],
                          capture_output=True, text=True,
                          env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"})
    assert done.returncode == 0, done.stdout + done.stderr
