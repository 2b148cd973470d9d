"""Block-sparse attention as one PyTorch operator with several backends."""

from __future__ import annotations

import math
import os
import warnings
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import cpp, cpu, full
from .lists import BlockLists
from .reference import dense_attention, spread, visible

BACKENDS = ("auto", "triton", "cpp", "cpu", "flex", "dense", "sdpa")


def block_sparse_attention(
    q: Tensor,  # (batch, heads, queries, head_dim)
    k: Tensor,  # (batch, kv_heads, keys, head_dim); heads is a multiple of kv_heads (grouped queries)
    v: Tensor,  # like k
    lists: BlockLists,
    *,
    lengths: Tensor | None = None,  # (batch,) where each text's keys end (right padding); None: the last
    starts: Tensor | None = None,  # (batch,) each text's first key (left padding); None: 0
    query_offset: int | Tensor | None = None,  # key position of the first query, or (batch,); None: 0
    causal: bool = False,  # a query sees no later key: query i sees keys up to query_offset + i
    scale: float | None = None,  # None: head_dim ** -0.5
    # (batch, heads, q_blocks, k_blocks), at least 0: multiplies the unnormalised weights of a block
    gate: Tensor | None = None,
    audit: BlockLists | None = None,  # dropped blocks whose gates get what keeping each would add to sum(grad * out)
    backend: str = "auto",
) -> Tensor:  # (batch, heads, queries, head_dim)
    """Attention of each query over the keys in its kept blocks.

    Queries are all of the sequence or a later part of it: query i stands at the position query_offset + i among the
    keys, which must be given where there are fewer queries than keys. Positions before `starts` and from `lengths` on
    are padding: their keys are not seen. A query that sees no key gives zeros and passes no gradient; so do queries
    that stand at padding.
    Gradients reach q, k, v and, exactly, the gate of every kept block: dL/dgate is the sum over the block of
    w * (dL/dw - delta), where w is the weight without the gate (Dao et al. 2022 give dL/dw and delta). The blocks of
    `audit` are others than those in `lists`; from a query that keeps nothing their gates get nothing.

    Backends: `triton` (NVIDIA GPUs), `cpu` (PyTorch), `cpp` (C++, compiled on first use; products in
    float32, and of bfloat16 in the forward pass as such with sums in float32 where the processor has AVX512_BF16; falls
    back to `cpu` with a warning that says why), `flex` (PyTorch's FlexAttention), `sdpa`
    (PyTorch's dense attention with a mask), `dense` (written out, also float64). `auto` takes the fastest that fits.
    `flex` and `sdpa` take no gate.

    Raises `TypeError` or `ValueError` that says what was expected. On a GPU lengths, starts and offsets are not looked
    at, which would wait for it: they are clamped to the keys.
    """
    _check(q, k, v, lists, gate, audit, backend)
    spans = _spans(q, k, lengths, starts, query_offset)
    if scale is not None and not math.isfinite(scale): raise ValueError(f"scale must be finite, got {scale}")
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if scale <= 0: q, scale = q * scale, 1.0  # backends take scales above 0
    if q.numel() == 0: return q + k.sum() + v.sum() + (0 if gate is None else gate.sum())  # empty, and differentiable
    if backend == "auto": backend = _fitting(q, lists, gate)
    if backend in ("dense", "sdpa", "flex"): _check_spans(q, k, spans)
    if backend == "dense":
        return dense_attention(q, k, v, lists.block_mask(), lists.block_size, spans=spans, causal=causal,
                               scale=scale, gate=gate, audit=None if audit is None else audit.block_mask())
    if backend == "sdpa":
        sizes = q.shape[2], k.shape[2]
        mask = spread(lists.block_mask(), *sizes, lists.block_size) & visible(*sizes, spans, causal, q.device)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale,
                                                               enable_gqa=q.shape[1] != k.shape[1])
        return out.masked_fill(~mask.any(-1, keepdim=True), 0)
    if backend == "flex":
        from .flex import block_mask, flex_attention
        return flex_attention(q, k, v, block_mask(lists, spans, causal), scale, spans)
    audited = (None, None) if audit is None else (audit.row_counts, audit.row_index)
    return _attention(q, k, v, lists.row_counts, lists.row_index, lists.col_counts, lists.col_index, spans, gate,
                      *audited, lists.block_size, causal, scale, backend)[0]


def _fitting(q: Tensor, lists: BlockLists, gate: Tensor | None) -> str:
    "What `auto` can know before it looks at the lists, which on a GPU would wait for it."
    if not q.is_cuda: return "auto"
    if _triton_cannot(q, lists) is None: return "triton"
    return "sdpa" if gate is None else "dense"


def _triton_cannot(q: Tensor, lists: BlockLists) -> str | None:
    "Why the Triton kernels cannot take these tensors, or None."
    if find_spec("triton") is None: return "needs the package triton"
    if not q.is_cuda and os.environ.get("TRITON_INTERPRET") != "1": return f"needs tensors on a GPU, got {q.device}"
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"takes float32, float16 and bfloat16, got {q.dtype}"
    if not 16 <= q.shape[-1] <= 128: return f"takes a head_dim of 16 to 128, got {q.shape[-1]}"
    if lists.block_size not in (16, 32, 64): return f"takes blocks of 16, 32 or 64 tokens, got {lists.block_size}"
    return None


def _spans(q: Tensor, k: Tensor, lengths: Tensor | None, starts: Tensor | None,
           query_offset: int | Tensor | None) -> Tensor | None:
    "Of each text the first key, the end of the keys and the position of the first query, (batch, 3) int32."
    batch, queries, keys = q.shape[0], q.shape[2], k.shape[2]
    if query_offset is None and queries < keys:
        raise ValueError(f"query_offset must be given for {queries} queries and {keys} keys")
    if isinstance(query_offset, int) and not 0 <= query_offset <= keys - queries:
        raise ValueError(f"query_offset must be 0 to {keys - queries}, got {query_offset}")
    if queries == keys and starts is lengths is None and (query_offset is None or isinstance(query_offset, int)):
        return None
    given = dict(starts=starts, lengths=lengths, query_offset=query_offset)
    spans = []
    for (name, x), most, otherwise in zip(given.items(), (keys, keys, keys - queries), (0, keys, 0)):
        if x is None: x = otherwise
        if isinstance(x, int): x = torch.full((batch,), x, device=q.device)
        if not isinstance(x, Tensor) or x.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} must be {'an int or ' * (name == 'query_offset')}an int32 or int64 tensor")
        if tuple(x.shape) != (batch,): raise ValueError(f"{name} must be ({batch},), got {tuple(x.shape)}")
        if x.device != q.device: raise ValueError(f"{name} are on {x.device}, q is on {q.device}")
        spans.append(x.clamp(0, most) if x.is_cuda else x)
    return torch.stack(spans, 1).to(torch.int32)


def _check_spans(q: Tensor, k: Tensor, spans: Tensor | None):
    "On a GPU they are clamped instead."
    if spans is None or spans.is_cuda: return
    limits = dict(starts=k.shape[2], lengths=k.shape[2], query_offset=k.shape[2] - q.shape[2])
    for (name, most), x in zip(limits.items(), spans.unbind(1)):
        if not 0 <= int(x.min()) <= int(x.max()) <= most:
            raise ValueError(f"{name} must be 0 to {most}, got {x.tolist()}")


def _check(q: Tensor, k: Tensor, v: Tensor, lists: BlockLists, gate: Tensor | None, audit: BlockLists | None,
           backend: str):
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor): raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.dim() != 4: raise ValueError(f"{name} must be (batch, heads, seq, head_dim), got {tuple(x.shape)}")
        if not x.is_floating_point(): raise TypeError(f"{name} must be floating-point, got {x.dtype}")
        if x.dtype != q.dtype: raise TypeError(f"q, k and v must have one dtype, got {q.dtype} and {x.dtype}")
        if x.device != q.device: raise ValueError(f"q, k and v must be on one device, got {q.device} and {x.device}")
    if not isinstance(lists, BlockLists): raise TypeError(f"lists must be a BlockLists, got {type(lists).__name__}")
    batch, heads, queries, dim = q.shape
    if dim == 0: raise ValueError("head_dim must be at least 1, got 0")
    if k.shape != v.shape or k.shape[0] != batch or k.shape[2] < queries or k.shape[3] != dim:
        raise ValueError(f"k and v must be (batch, kv_heads, keys, head_dim) = ({batch}, any, {queries} or more, {dim})"
                         f", got {tuple(k.shape)} and {tuple(v.shape)}")
    if k.shape[1] == 0 and heads or k.shape[1] and heads % k.shape[1]:
        raise ValueError(f"q's {heads} heads must be a multiple of k's {k.shape[1]}")
    if lists.seq_len != k.shape[2]: raise ValueError(f"lists are for {lists.seq_len} keys, k has {k.shape[2]}")
    if lists.query_len != queries: raise ValueError(f"lists are for {lists.query_len} queries, q has {queries}")
    for name, of in (("lists", lists), ("audit", audit)):
        if of is None: continue
        if not isinstance(of, BlockLists): raise TypeError(f"{name} must be a BlockLists, got {type(of).__name__}")
        if tuple(of.row_counts.shape[:2]) != (batch, heads):
            raise ValueError(f"{name} are for {tuple(of.row_counts.shape[:2])} (batch, heads), q has {(batch, heads)}")
        if of.device != q.device: raise ValueError(f"{name} are on {of.device}, q is on {q.device}")
        if (of.query_len, of.seq_len, of.block_size) != (lists.query_len, lists.seq_len, lists.block_size):
            raise ValueError(f"audit is for {of.query_len} queries and {of.seq_len} keys in blocks of {of.block_size}"
                             f", lists for {lists.query_len} and {lists.seq_len} in blocks of {lists.block_size}")
    if gate is not None:
        if not isinstance(gate, Tensor) or not gate.is_floating_point():
            raise TypeError("gate must be a floating-point tensor")
        if gate.shape != lists.row_index.shape:
            raise ValueError(f"gate must be (batch, heads, q_blocks, k_blocks) = {tuple(lists.row_index.shape)}"
                             f", got {tuple(gate.shape)}")
        if gate.device != q.device: raise ValueError(f"gate is on {gate.device}, q is on {q.device}")
    if audit is not None and gate is None: raise ValueError("audit needs a gate, whose gradient it extends")
    if backend not in BACKENDS: raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend in ("flex", "sdpa") and gate is not None: raise ValueError(f"backend {backend!r} takes no gate")
    if backend in ("cpu", "cpp") and q.device.type != "cpu":
        raise ValueError(f"backend {backend!r} needs tensors on the CPU, got {q.device}")
    if backend == "triton" and (reason := _triton_cannot(q, lists)): raise ValueError(f"backend 'triton' {reason}")


def _implementation(backend: str, q: Tensor, k: Tensor, row_counts: Tensor, spans: Tensor | None, gate: Tensor | None,
                    block_size: int):
    "The module that computes this call. It may look at the tensors' values, for it runs inside the operator."
    if backend == "triton":
        from . import triton_kernels
        return triton_kernels
    _check_spans(q, k, spans)
    if backend == "cpu": return cpu
    if backend == "auto" and full.fits(q, k, row_counts, spans, gate): return full
    reason = cpp.why_not(q, block_size)
    if reason and backend == "cpp":
        warnings.warn(f"block_sparse_attention uses backend 'cpu', because 'cpp' is not available: {reason}",
                      stacklevel=2)
    return cpu if reason else cpp


@torch.library.custom_op("dendritic_kernels::block_sparse_attention", mutates_args=())
def _attention(
    q: Tensor, k: Tensor, v: Tensor, row_counts: Tensor, row_index: Tensor, col_counts: Tensor, col_index: Tensor,
    spans: Tensor | None,
    gate: Tensor | None, audit_counts: Tensor | None, audit_index: Tensor | None, block_size: int, causal: bool,
    scale: float, backend: str,
) -> tuple[Tensor, Tensor]:
    implementation = _implementation(backend, q, k, row_counts, spans, gate, block_size)
    with torch.autocast(q.device.type, enabled=False):  # sums stay in float32
        out, lse = implementation.forward(q, k, v, row_counts, row_index, spans, gate, block_size, causal, scale)
    like = torch.empty_like(q, device="meta")  # queries of a model are often a view of (batch, seq, heads, head_dim)
    return out if out.stride() == like.stride() else torch.empty_like(q).copy_(out), lse


@_attention.register_fake
def _(q, k, v, row_counts, row_index, col_counts, col_index, spans, gate, audit_counts, audit_index, block_size,
      causal, scale, backend):
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float64
                                             if q.dtype == torch.float64 else torch.float32)


@torch.library.custom_op("dendritic_kernels::block_sparse_attention_backward", mutates_args=())
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, row_counts: Tensor, row_index: Tensor,
    col_counts: Tensor, col_index: Tensor,
    spans: Tensor | None, gate: Tensor | None, audit_counts: Tensor | None, audit_index: Tensor | None,
    block_size: int, causal: bool, scale: float, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # said in the forward pass
        implementation = _implementation(backend, q, k, row_counts, spans, gate, block_size)
    lists = (row_counts, row_index, col_counts, col_index)
    if implementation is cpp: lists = lists[2:]
    elif backend != "triton": lists = lists[:2]
    with torch.autocast(q.device.type, enabled=False):
        dq, dk, dv, dgate = implementation.backward(grad, q, k, v, out, lse, *lists, spans, gate, audit_counts,
                                                    audit_index, block_size, causal, scale)
    return dq, dk, dv, q.new_empty(0) if dgate is None else dgate


@_backward.register_fake
def _(grad, q, k, v, out, lse, row_counts, row_index, col_counts, col_index, spans, gate, audit_counts, audit_index,
      block_size, causal, scale, backend):
    dgate = q.new_empty(0) if gate is None else gate.new_empty(gate.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dgate


def _remember(ctx, inputs, output):
    *tensors, block_size, causal, scale, backend = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.settings = block_size, causal, scale, backend


def _differentiate(ctx, grad, _):
    (q, k, v, row_counts, row_index, col_counts, col_index, spans, gate, audit_counts, audit_index, out,
     lse) = ctx.saved_tensors
    dq, dk, dv, dgate = _backward(grad, q, k, v, out, lse, row_counts, row_index, col_counts, col_index, spans, gate,
                                  audit_counts, audit_index, *ctx.settings)
    return dq, dk, dv, None, None, None, None, None, None if gate is None else dgate, *(None,) * 6


_attention.register_autograd(_differentiate, setup_context=_remember)


def _products(q: Tensor, counts: Tensor, index: Tensor, spans: Tensor | None, block_size: int, causal: bool,
              number: int) -> int:
    """Operations of `number` matrix products over the kept blocks that any query sees, each counted whole: 2 for a
    multiplication and its addition."""
    seen = cpu.visible_part(counts, index, spans, q.shape[2], block_size, causal)[1]
    return 2 * number * int(seen.sum()) * block_size ** 2 * q.shape[-1]


@register_flop_formula(torch.ops.dendritic_kernels.block_sparse_attention, get_raw=True)
def _(q, k, v, row_counts, row_index, col_counts, col_index, spans, gate, audit_counts, audit_index, block_size,
      causal, *args, out_val=None, **kwargs) -> int:
    return _products(q, row_counts, row_index, spans, block_size, causal, 2)


@register_flop_formula(torch.ops.dendritic_kernels.block_sparse_attention_backward, get_raw=True)
def _(grad, q, k, v, out, lse, row_counts, row_index, col_counts, col_index, spans, gate, audit_counts, audit_index,
      block_size, causal, *args, out_val=None, **kwargs) -> int:
    audited = 0 if audit_counts is None else _products(q, audit_counts, audit_index, spans, block_size, causal, 2)
    return _products(q, row_counts, row_index, spans, block_size, causal, 5) + audited
