"""Block-sparse attention on NVIDIA GPUs: each program walks the list of its kept blocks.

Scores live in base 2, with the scale folded in. Blocks that every query of a tile sees whole need no element
mask; lists ascend, so the others (the ragged end of a text, the diagonal of a causal mask) stand at the end of
a list and are walked by a second loop. Gradients use no atomics: keys and values are summed along column
lists, queries and the gate along row lists, so the same inputs give the same bits.
"""

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)
LARGEST = tl.constexpr(80.0 * 1.4426950408889634)  # as in `cpu`


@triton.jit
def _list_kernel(scores, threshold, row_counts, row_index, col_counts, col_index, stride_group, stride_row, stride_col,
                 blocks, BLOCKS: tl.constexpr):
    "One program makes one list: rows first, then columns."
    line, group = tl.program_id(0) % (2 * blocks), (tl.program_id(0) // (2 * blocks)).to(tl.int64)
    is_col = line >= blocks
    number = tl.where(is_col, line - blocks, line)
    places = tl.arange(0, BLOCKS)
    inside = places < blocks
    start = scores + group * stride_group + number * tl.where(is_col, stride_col, stride_row)
    kept = (inside & (tl.load(start + places * tl.where(is_col, stride_row, stride_col), mask=inside,
                              other=0).to(tl.float32) > threshold)).to(tl.int32)
    dropped = tl.where(inside, 1 - kept, 0)
    count = tl.sum(kept)
    place = tl.where(kept == 1, tl.cumsum(kept) - 1, count + tl.cumsum(dropped) - 1)
    out = group * blocks + number
    if is_col:
        tl.store(col_counts + out, count)
        tl.store(col_index + out * blocks + place, places, mask=inside)
    else:
        tl.store(row_counts + out, count)
        tl.store(row_index + out * blocks + place, places, mask=inside)


def build_lists(scores: Tensor, threshold: float = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Row counts and indices, column counts and indices of what is above the threshold in a mask or in scores (batch,
    heads, blocks, blocks), in one launch."""
    shape = scores.shape
    scores = (scores.view(torch.uint8) if scores.dtype == torch.bool else scores).flatten(0, 1)
    groups, blocks = scores.shape[0], scores.shape[-1]
    counts = [torch.empty(*shape[:3], dtype=torch.int32, device=scores.device) for _ in range(2)]
    indices = [torch.empty(shape, dtype=torch.int32, device=scores.device) for _ in range(2)]
    if groups:
        with _on(scores):
            _list_kernel[(2 * blocks * groups,)](scores, threshold, counts[0], indices[0], counts[1], indices[1],
                                                 *scores.stride(), blocks, BLOCKS=triton.next_power_of_2(blocks))
    return counts[0], indices[0], counts[1], indices[1]


@triton.jit
def _tile(base, start, stride, end, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, BLOCK: tl.constexpr):
    "Rows `start` to `start + BLOCK` of a matrix (end, DIM); zeros outside."
    rows, cols = start + tl.arange(0, BLOCK), tl.arange(0, DIM_PADDED)
    return tl.load(base + rows[:, None].to(tl.int64) * stride + cols[None, :],
                   mask=(rows[:, None] < end) & (cols[None, :] < DIM), other=0.0)


@triton.jit
def _store_tile(base, tile, start, stride, seq, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, BLOCK: tl.constexpr):
    rows, cols = start + tl.arange(0, BLOCK), tl.arange(0, DIM_PADDED)
    tl.store(base + rows[:, None].to(tl.int64) * stride + cols[None, :], tile.to(base.dtype.element_ty),
             mask=(rows[:, None] < seq) & (cols[None, :] < DIM))


@triton.jit
def _place(blocks, heads):
    """Of a program: its block, its pair of batch and head, and these two apart. 64-bit division would call a function,
    so there is none."""
    pair = tl.program_id(0) // blocks
    return tl.program_id(0) % blocks, pair.to(tl.int64), (pair // heads).to(tl.int64), pair % heads


@triton.jit
def _row_reach(counts, index, line, q_block, end, blocks, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
               CAUSAL: tl.constexpr):
    "Of a row's list: how many blocks its queries see whole, and how many they see at all."
    places = tl.arange(0, BLOCKS)
    kept = places < tl.load(counts + line)
    numbers = tl.load(index + line * blocks + places, mask=kept, other=0)
    whole, some = end // BLOCK, (end + BLOCK - 1) // BLOCK
    if CAUSAL: whole, some = tl.minimum(whole, q_block), tl.minimum(some, q_block + 1)
    some = tl.where(q_block * BLOCK < end, some, 0)
    seen_whole = tl.sum((kept & (numbers < tl.minimum(whole, some))).to(tl.int32))
    return seen_whole, tl.sum((kept & (numbers < some)).to(tl.int32))


@triton.jit
def _col_reach(counts, index, line, k_block, end, blocks, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
               CAUSAL: tl.constexpr):
    "Of a column's list: the first and the end of the query blocks that see anything of it."
    places = tl.arange(0, BLOCKS)
    kept = places < tl.load(counts + line)
    numbers = tl.load(index + line * blocks + places, mask=kept, other=0)
    last = tl.sum((kept & (numbers * BLOCK < end) & (k_block * BLOCK < end)).to(tl.int32))
    first = tl.sum((kept & (numbers < k_block) & CAUSAL).to(tl.int32))
    return first, last


@triton.jit
def _seen(q_start, k_start, end, BLOCK: tl.constexpr, CAUSAL: tl.constexpr):
    """Which pairs of a tile (queries, keys) count. Only numbers vary from tile to tile: a pipelined loop would keep
    whole tensors for each stage."""
    keys = tl.arange(0, BLOCK)[None, :]
    seen = keys < end - k_start
    if CAUSAL: seen = seen & (keys - tl.arange(0, BLOCK)[:, None] <= q_start - k_start)
    return seen


@triton.jit
def _forward_step(q, k_base, v_base, gate, gate_row, k_block, q_start, end, stride_k, stride_v, scale, largest, total,
                  acc,
                  DIM: tl.constexpr, DIM_PADDED: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr,
                  GATED: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    "One block of keys of the online softmax."
    k_start = k_block * BLOCK
    k = _tile(k_base, k_start, stride_k, end, DIM, DIM_PADDED, BLOCK)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if GATED: scores += tl.log2(tl.load(gate + gate_row + k_block).to(tl.float32))
    if MASKED: scores = tl.where(_seen(q_start, k_start, end, BLOCK, CAUSAL), scores, -float("inf"))
    new = tl.maximum(largest, tl.max(scores, 1))
    base = tl.where(new == -float("inf"), 0.0, new)
    weights = tl.exp2(scores - base[:, None])
    old = tl.exp2(largest - base)
    v = _tile(v_base, k_start, stride_v, end, DIM, DIM_PADDED, BLOCK)
    acc = acc * old[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return new, total * old + tl.sum(weights, 1), acc


@triton.jit
def _forward_kernel(q, k, v, out, lse, counts, index, lengths, gate, scale, heads, groups, seq, blocks,
                    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
                    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
                    CAUSAL: tl.constexpr,
                    RAGGED: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr):
    q_block, pair, batch, head = _place(blocks, heads)
    line, q_start = pair * blocks + q_block, q_block * BLOCK
    end = tl.load(lengths + batch) if RAGGED else seq
    whole, some = _row_reach(counts, index, line, q_block, end, blocks, BLOCK, BLOCKS, CAUSAL)
    q_tile = _tile(q + batch * stride_qb + head.to(tl.int64) * stride_qh, q_start, stride_qs, end, DIM, DIM_PADDED,
                   BLOCK)
    k_base = k + batch * stride_kb + (head // groups).to(tl.int64) * stride_kh
    v_base = v + batch * stride_vb + (head // groups).to(tl.int64) * stride_vh
    largest = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, DIM_PADDED], tl.float32)
    for i in range(whole):
        largest, total, acc = _forward_step(q_tile, k_base, v_base, gate, line * blocks,
                                            tl.load(index + line * blocks + i), q_start, end, stride_ks, stride_vs,
                                            scale * LOG2E,
                                            largest, total, acc, DIM, DIM_PADDED, BLOCK, CAUSAL, GATED, False,
                                            PRECISION)
    for i in range(whole, some):
        largest, total, acc = _forward_step(q_tile, k_base, v_base, gate, line * blocks,
                                            tl.load(index + line * blocks + i), q_start, end, stride_ks, stride_vs,
                                            scale * LOG2E,
                                            largest, total, acc, DIM, DIM_PADDED, BLOCK, CAUSAL, GATED, True, PRECISION)
    rows = q_start + tl.arange(0, BLOCK)
    alive = (total != 0) & (rows < end)  # NaN is alive
    acc = tl.where(alive[:, None], acc / tl.where(alive, total, 1.0)[:, None], 0.0)
    _store_tile(out + pair * seq * DIM, acc, q_start, DIM, seq, DIM, DIM_PADDED, BLOCK)
    tl.store(lse + pair * seq + rows, tl.where(alive, (largest + tl.log2(tl.where(alive, total, 1.0))) / LOG2E,
                                               float("inf")), mask=rows < seq)


@triton.jit
def _slopes(left, left_other, right, right_other, lse, delta, seen, scale, GATED: tl.constexpr,
            PRECISION: tl.constexpr):
    """Weights without the gate, and those times dL/dweight, of one tile: (queries, keys) from (q, grad, k, v),
    (keys, queries) from (k, v, q, grad). The latter are left operands of the next product as they are, without a way
    through shared memory."""
    scores = tl.dot(left, tl.trans(right), input_precision=PRECISION) * (scale * LOG2E) - lse * LOG2E
    if GATED: scores = tl.where(scores > LARGEST, LARGEST, scores)  # a closed block may dwarf the open ones
    weights = tl.where(seen, tl.exp2(scores), 0.0)
    return weights, weights * (tl.dot(left_other, tl.trans(right_other), input_precision=PRECISION) - delta)


@triton.jit
def _query_grad_kernel(q, k, v, grad, lse, delta, counts, index, lengths, gate, dq, dgate, scale, heads, groups, seq,
                       blocks,
                       stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh,
                       stride_vs,
                       DIM: tl.constexpr, DIM_PADDED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
                       CAUSAL: tl.constexpr,
                       RAGGED: tl.constexpr, GATED: tl.constexpr, AUDIT: tl.constexpr, PRECISION: tl.constexpr):
    "Gradients of one block of queries, and of the gate of each of its kept blocks; in an audit, of the gate alone."
    q_block, pair, batch, head = _place(blocks, heads)
    line, q_start = pair * blocks + q_block, q_block * BLOCK
    end = tl.load(lengths + batch) if RAGGED else seq
    _, some = _row_reach(counts, index, line, q_block, end, blocks, BLOCK, BLOCKS, CAUSAL)
    q_tile = _tile(q + batch * stride_qb + head.to(tl.int64) * stride_qh, q_start, stride_qs, end, DIM, DIM_PADDED,
                   BLOCK)
    grad_tile = _tile(grad + pair * seq * DIM, q_start, DIM, end, DIM, DIM_PADDED, BLOCK)
    rows = q_start + tl.arange(0, BLOCK)
    lse_rows = tl.load(lse + pair * seq + rows, mask=rows < end, other=float("inf"))
    delta_rows = tl.load(delta + pair * seq + rows, mask=rows < end, other=0.0)
    k_base = k + batch * stride_kb + (head // groups).to(tl.int64) * stride_kh
    v_base = v + batch * stride_vb + (head // groups).to(tl.int64) * stride_vh
    acc = tl.zeros([BLOCK, DIM_PADDED], tl.float32)
    for i in range(some):
        k_block = tl.load(index + line * blocks + i)
        k_tile = _tile(k_base, k_block * BLOCK, stride_ks, end, DIM, DIM_PADDED, BLOCK)
        v_tile = _tile(v_base, k_block * BLOCK, stride_vs, end, DIM, DIM_PADDED, BLOCK)
        seen = _seen(q_start, k_block * BLOCK, end, BLOCK, CAUSAL)
        unused, slopes = _slopes(q_tile, grad_tile, k_tile, v_tile, lse_rows[:, None], delta_rows[:, None], seen, scale,
                                 GATED, PRECISION)
        if GATED:
            tl.store(dgate + line * blocks + k_block, tl.sum(slopes))
            if not AUDIT: slopes *= tl.load(gate + line * blocks + k_block).to(tl.float32)
        if not AUDIT: acc += tl.dot(slopes.to(k_tile.dtype), k_tile, input_precision=PRECISION)
    if not AUDIT: _store_tile(dq + pair * seq * DIM, acc * scale, q_start, DIM, seq, DIM, DIM_PADDED, BLOCK)


@triton.jit
def _key_grad_kernel(q, k, v, grad, lse, delta, counts, index, lengths, gate, dk, dv, scale, heads, groups, seq, blocks,
                     stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
                     DIM: tl.constexpr, DIM_PADDED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
                     CAUSAL: tl.constexpr,
                     RAGGED: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr):
    "Gradients of one block of keys and values from one query head; where heads share keys, the caller sums them."
    k_block, pair, batch, head = _place(blocks, heads)
    kv_head = (head // groups).to(tl.int64)
    line, k_start, places = pair * blocks + k_block, k_block * BLOCK, tl.arange(0, BLOCK)
    end = tl.load(lengths + batch) if RAGGED else seq
    first, last = _col_reach(counts, index, line, k_block, end, blocks, BLOCK, BLOCKS, CAUSAL)
    k_tile = _tile(k + batch * stride_kb + kv_head * stride_kh, k_start, stride_ks, end, DIM, DIM_PADDED, BLOCK)
    v_tile = _tile(v + batch * stride_vb + kv_head * stride_vh, k_start, stride_vs, end, DIM, DIM_PADDED, BLOCK)
    q_base, grad_base = q + batch * stride_qb + head.to(tl.int64) * stride_qh, grad + pair * seq * DIM
    dk_acc = tl.zeros([BLOCK, DIM_PADDED], tl.float32)
    dv_acc = tl.zeros([BLOCK, DIM_PADDED], tl.float32)
    for i in range(first, last):
        q_block = tl.load(index + line * blocks + i)
        q_start = q_block * BLOCK
        rows = q_start + places
        q_tile = _tile(q_base, q_start, stride_qs, end, DIM, DIM_PADDED, BLOCK)
        grad_tile = _tile(grad_base, q_start, DIM, end, DIM, DIM_PADDED, BLOCK)
        lse_rows = tl.where(places < end - q_start, tl.load(lse + pair * seq + rows, mask=rows < end, other=0.0),
                            float("inf"))
        delta_rows = tl.load(delta + pair * seq + rows, mask=rows < end, other=0.0)
        seen = tl.trans(_seen(q_start, k_start, end, BLOCK, CAUSAL))
        weights, slopes = _slopes(k_tile, v_tile, q_tile, grad_tile, lse_rows[None, :], delta_rows[None, :], seen,
                                  scale, GATED, PRECISION)
        if GATED:
            of_block = tl.load(gate + (pair * blocks + q_block) * blocks + k_block).to(tl.float32)
            weights *= of_block
            slopes *= of_block
        dv_acc += tl.dot(weights.to(grad_tile.dtype), grad_tile, input_precision=PRECISION)
        dk_acc += tl.dot(slopes.to(q_tile.dtype), q_tile, input_precision=PRECISION)
    _store_tile(dk + pair * seq * DIM, dk_acc * scale, k_start, DIM, seq, DIM, DIM_PADDED, BLOCK)
    _store_tile(dv + pair * seq * DIM, dv_acc, k_start, DIM, seq, DIM, DIM_PADDED, BLOCK)


def _on(x: Tensor):
    "Launches go to the GPU of `x`, whichever is current."
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _rows_contiguous(*tensors: Tensor) -> list[Tensor]:
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def _lengths(spans: Tensor | None) -> Tensor | None:
    "Where keys end: these kernels take queries and keys that both begin at 0."
    return None if spans is None else spans[:, 1].contiguous()


def launch_options(kernel, dim: int, dtype: torch.dtype, capability: int) -> dict[str, int]:
    """Warps and stages: as few and as many as go without register spills and with the shared memory of an A100
    (`compile_check`). `capability` is the GPU's compute capability times ten."""
    if dtype == torch.float32: return dict(num_warps=16, num_stages=1)  # exact products, without tensor cores
    if dim <= 64: return dict(num_warps=8 if kernel is _query_grad_kernel else 4, num_stages=3)
    if kernel is _query_grad_kernel and capability >= 100: return dict(num_warps=4, num_stages=1)
    return dict(num_warps=8, num_stages=2)


def _capability(x: Tensor) -> int:
    if not x.is_cuda: return 80  # Triton's interpreter
    major, minor = torch.cuda.get_device_capability(x.device)
    return 10 * major + minor


def _common(q: Tensor, k: Tensor, v: Tensor, index: Tensor, lengths: Tensor | None, gate: Tensor | None,
            block_size: int, causal: bool) -> tuple[list, dict]:
    "What every launch needs: sizes and strides, and the compile-time settings."
    dim = q.shape[-1]
    sizes = [q.shape[1], q.shape[1] // k.shape[1], q.shape[2], index.shape[-1],
             *(x.stride(i) for x in (q, k, v) for i in range(3))]
    return sizes, dict(DIM=dim, DIM_PADDED=triton.next_power_of_2(dim), BLOCK=block_size,
                       BLOCKS=triton.next_power_of_2(index.shape[-1]), CAUSAL=causal, RAGGED=lengths is not None,
                       GATED=gate is not None,
                       PRECISION="ieee" if q.dtype == torch.float32 else "tf32")


def forward(q: Tensor, k: Tensor, v: Tensor, row_counts: Tensor, row_index: Tensor, spans: Tensor | None,
            gate: Tensor | None,
            block_size: int, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    "Output like q, and the logarithm of the weights' sum (batch, heads, seq), +inf where nothing is kept."
    lengths = _lengths(spans)
    q, k, v = _rows_contiguous(q, k, v)
    sizes, settings = _common(q, k, v, row_index, lengths, gate, block_size, causal)
    gate = gate if gate is None else gate.contiguous()
    blocks, kind = row_index.shape[-1], (q.shape[-1], q.dtype, _capability(q))
    out, lse = torch.empty(q.shape, dtype=q.dtype,
                           device=q.device), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    with _on(q):
        _forward_kernel[(blocks * q.shape[0] * q.shape[1],)](q, k, v, out, lse, row_counts, row_index, lengths, gate,
                                                             scale, *sizes, **settings,
                                                             **launch_options(_forward_kernel, *kind))
    return out, lse


def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, row_counts: Tensor,
             row_index: Tensor, col_counts: Tensor, col_index: Tensor,
             spans: Tensor | None, gate: Tensor | None, audit_counts: Tensor | None, audit_index: Tensor | None,
             block_size: int, causal: bool, scale: float,
             ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    "Gradients of q, k, v and, where there is a gate, of it."
    lengths = _lengths(spans)
    q, k, v = _rows_contiguous(q, k, v)
    grad, gate = grad.contiguous(), gate if gate is None else gate.contiguous()
    sizes, settings = _common(q, k, v, row_index, lengths, gate, block_size, causal)
    delta = (grad.float() * out.float()).sum(-1)
    shared = q.shape[1] != k.shape[1]
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.empty(q.shape, dtype=torch.float32 if shared else q.dtype, device=q.device) for _ in range(2))
    dgate = None if gate is None else torch.zeros(gate.shape, dtype=torch.float32, device=gate.device)
    blocks, batch, kind = row_index.shape[-1], q.shape[0], (q.shape[-1], q.dtype, _capability(q))
    grid, queries = (blocks * batch * q.shape[1],), launch_options(_query_grad_kernel, *kind)
    with _on(q):
        _query_grad_kernel[grid](q, k, v, grad, lse, delta, row_counts, row_index, lengths, gate, dq, dgate, scale,
                                 *sizes, AUDIT=False, **settings, **queries)
        _key_grad_kernel[grid](q, k, v, grad, lse, delta, col_counts, col_index, lengths, gate, dk, dv, scale, *sizes,
                               **settings, **launch_options(_key_grad_kernel, *kind))
        if audit_counts is not None:
            _query_grad_kernel[grid](q, k, v, grad, lse, delta, audit_counts, audit_index, lengths, gate, dq, dgate,
                                     scale, *sizes, AUDIT=True, **settings, **queries)
    if shared: dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2).to(k.dtype) for x in (dk, dv))
    return dq, dk, dv, None if gate is None else dgate.to(gate.dtype)
