"""Block-sparse attention on NVIDIA GPUs: each program walks the list of its kept blocks.

Scores live in base 2, with the scale folded in. Blocks that every query of a tile sees whole need no element
mask; lists ascend, so the others stand at a list's ends (padding on the left at its beginning, the ragged end of a
text and the diagonal of a causal mask at its end) and are walked by loops of their own. Gradients use no atomics: keys
and values are summed along column lists, queries and the gate along row lists, so the same inputs give the same bits.
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
                 rows, cols, BLOCKS: tl.constexpr):
    "One program makes one list: rows first, then columns."
    line, group = tl.program_id(0) % (rows + cols), (tl.program_id(0) // (rows + cols)).to(tl.int64)
    is_col = line >= rows
    number, length = tl.where(is_col, line - rows, line), tl.where(is_col, rows, cols)
    places = tl.arange(0, BLOCKS)
    inside = places < length
    start = scores + group * stride_group + number * tl.where(is_col, stride_col, stride_row)
    kept = (inside & (tl.load(start + places * tl.where(is_col, stride_row, stride_col), mask=inside,
                              other=0).to(tl.float32) > threshold)).to(tl.int32)
    dropped = tl.where(inside, 1 - kept, 0)
    count = tl.sum(kept)
    place = tl.where(kept == 1, tl.cumsum(kept) - 1, count + tl.cumsum(dropped) - 1)
    out = group * tl.where(is_col, cols, rows) + number
    if is_col:
        tl.store(col_counts + out, count)
        tl.store(col_index + out * length + place, places, mask=inside)
    else:
        tl.store(row_counts + out, count)
        tl.store(row_index + out * length + place, places, mask=inside)


def build_lists(scores: Tensor, threshold: float = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Row counts and indices, column counts and indices of what is above the threshold in a mask or in scores (batch,
    heads, q_blocks, k_blocks), in one launch."""
    *outer, rows, cols = scores.shape
    scores = (scores.view(torch.uint8) if scores.dtype == torch.bool else scores).flatten(0, 1)
    empty = lambda *shape: torch.empty(*outer, *shape, dtype=torch.int32, device=scores.device)
    lists = empty(rows), empty(rows, cols), empty(cols), empty(cols, rows)
    if scores.shape[0]:
        with _on(scores):
            _list_kernel[((rows + cols) * scores.shape[0],)](scores, threshold, *lists, *scores.stride(), rows, cols,
                                                             BLOCKS=triton.next_power_of_2(max(rows, cols)))
    return lists


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
def _span(spans, batch, keys, RAGGED: tl.constexpr):
    "Of a text: its first key, the end of its keys, and the place of the first query among them."
    if RAGGED:
        return tl.load(spans + 3 * batch), tl.load(spans + 3 * batch + 1), tl.load(spans + 3 * batch + 2)
    else:
        return 0, keys, 0


@triton.jit
def _below(kept, numbers, limit):
    return tl.sum((kept & (numbers < limit)).to(tl.int32))


@triton.jit
def _row_reach(counts, index, line, q_start, queries, k_blocks, start, end, first, BLOCK: tl.constexpr,
               BLOCKS: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr):
    """Places in a row's list: the first block that any query of the tile sees, the first and the end of those that all
    see whole, and the end of those that any sees."""
    places = tl.arange(0, BLOCKS)
    kept = places < tl.load(counts + line)
    numbers = tl.load(index + line * k_blocks + places, mask=kept, other=0)
    last = tl.minimum(tl.minimum(q_start + BLOCK, queries) + first, end)  # end of the tile's queries among the keys
    whole, some = end // BLOCK, (end + BLOCK - 1) // BLOCK
    if CAUSAL: whole, some = tl.minimum(whole, (q_start + first + 1) // BLOCK), (last + BLOCK - 1) // BLOCK
    some = tl.where((q_start + first < end) & (last > start), some, 0)
    until, begin, clean = _below(kept, numbers, some), 0, 0
    if RAGGED:
        begin = tl.minimum(_below(kept, numbers, start // BLOCK), until)
        clean = tl.minimum(_below(kept, numbers, (start + BLOCK - 1) // BLOCK), until)
    return begin, clean, tl.maximum(tl.minimum(_below(kept, numbers, whole), until), clean), until


@triton.jit
def _col_reach(counts, index, line, k_start, queries, q_blocks, start, end, first, BLOCK: tl.constexpr,
               BLOCKS: tl.constexpr, CAUSAL: tl.constexpr):
    "Of a column's list: the first and the end of the query blocks that see anything of it."
    places = tl.arange(0, BLOCKS)
    kept = places < tl.load(counts + line)
    numbers = tl.load(index + line * q_blocks + places, mask=kept, other=0)
    seen = (k_start < end) & (k_start + BLOCK > start) & (numbers * BLOCK + first < end)
    least = start  # where a query must stand at least
    if CAUSAL: least = tl.maximum(k_start, start)
    blind = (numbers + 1) * BLOCK + first <= least
    return tl.sum((kept & blind).to(tl.int32)), tl.sum((kept & seen).to(tl.int32))


@triton.jit
def _seen(q_place, k_start, start, end, BLOCK: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr):
    """Which pairs of a tile (queries, keys) count, queries at padding apart. Only numbers vary from tile to tile: a
    pipelined loop would keep whole tensors for each stage."""
    keys = tl.arange(0, BLOCK)[None, :]
    seen = keys < end - k_start
    if RAGGED:
        seen = seen & (keys >= start - k_start)
        if CAUSAL: keys, seen = tl.where(seen, keys, 1 << 30), keys < BLOCK  # one mask of pairs, for want of registers
    if CAUSAL: seen = seen & (keys - tl.arange(0, BLOCK)[:, None] <= q_place - k_start)
    return seen


@triton.jit
def _forward_step(q, k_base, v_base, gate, gate_row, k_block, q_place, start, end, stride_k, stride_v, scale, largest,
                  total, acc,
                  DIM: tl.constexpr, DIM_PADDED: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr,
                  RAGGED: tl.constexpr, GATED: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    "One block of keys of the online softmax."
    k_start = k_block * BLOCK
    k = _tile(k_base, k_start, stride_k, end, DIM, DIM_PADDED, BLOCK)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if GATED: scores += tl.log2(tl.load(gate + gate_row + k_block).to(tl.float32))
    if MASKED: scores = tl.where(_seen(q_place, k_start, start, end, BLOCK, CAUSAL, RAGGED), scores, -float("inf"))
    new = tl.maximum(largest, tl.max(scores, 1))
    base = tl.where(new == -float("inf"), 0.0, new)
    weights = tl.exp2(scores - base[:, None])
    old = tl.exp2(largest - base)
    v = _tile(v_base, k_start, stride_v, end, DIM, DIM_PADDED, BLOCK)
    acc = acc * old[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return new, total * old + tl.sum(weights, 1), acc


@triton.jit
def _forward_kernel(q, k, v, out, lse, counts, index, spans, gate, scale, heads, groups, queries, keys, q_blocks,
                    k_blocks,
                    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
                    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
                    CAUSAL: tl.constexpr,
                    RAGGED: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr):
    q_block, pair, batch, head = _place(q_blocks, heads)
    line, q_start = pair * q_blocks + q_block, q_block * BLOCK
    start, end, first = _span(spans, batch, keys, RAGGED)
    begin, clean, whole, some = _row_reach(counts, index, line, q_start, queries, k_blocks, start, end, first, BLOCK,
                                           BLOCKS, CAUSAL, RAGGED)
    q_end = tl.minimum(queries, end - first)  # later ones are padding
    q_tile = _tile(q + batch * stride_qb + head.to(tl.int64) * stride_qh, q_start, stride_qs, q_end, DIM, DIM_PADDED,
                   BLOCK)
    k_base = k + batch * stride_kb + (head // groups).to(tl.int64) * stride_kh
    v_base = v + batch * stride_vb + (head // groups).to(tl.int64) * stride_vh
    largest = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, DIM_PADDED], tl.float32)
    if RAGGED:
        for i in range(begin, clean):
            largest, total, acc = _forward_step(q_tile, k_base, v_base, gate, line * k_blocks,
                                                tl.load(index + line * k_blocks + i), q_start + first, start, end,
                                                stride_ks, stride_vs, scale * LOG2E, largest, total, acc, DIM,
                                                DIM_PADDED, BLOCK, CAUSAL, RAGGED, GATED, True, PRECISION)
    for i in range(clean, whole):
        largest, total, acc = _forward_step(q_tile, k_base, v_base, gate, line * k_blocks,
                                            tl.load(index + line * k_blocks + i), q_start + first, start, end,
                                            stride_ks, stride_vs, scale * LOG2E, largest, total, acc, DIM,
                                            DIM_PADDED, BLOCK, CAUSAL, RAGGED, GATED, False, PRECISION)
    for i in range(whole, some):
        largest, total, acc = _forward_step(q_tile, k_base, v_base, gate, line * k_blocks,
                                            tl.load(index + line * k_blocks + i), q_start + first, start, end,
                                            stride_ks, stride_vs, scale * LOG2E, largest, total, acc, DIM,
                                            DIM_PADDED, BLOCK, CAUSAL, RAGGED, GATED, True, PRECISION)
    rows = q_start + tl.arange(0, BLOCK)
    alive = (total != 0) & (rows < q_end) & (rows >= start - first)  # NaN is alive
    acc = tl.where(alive[:, None], acc / tl.where(alive, total, 1.0)[:, None], 0.0)
    _store_tile(out + pair * queries * DIM, acc, q_start, DIM, queries, DIM, DIM_PADDED, BLOCK)
    tl.store(lse + pair * queries + rows, tl.where(alive, (largest + tl.log2(tl.where(alive, total, 1.0))) / LOG2E,
                                                   float("inf")), mask=rows < queries)


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
def _change(q, grad, k, v, lse, delta, seen, scale, PRECISION: tl.constexpr):
    """What keeping a dropped block whole would add to the sum of grad * out. Bounded, where the derivative at a closed
    gate grows with the weight of what is left out."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E) - lse[:, None] * LOG2E
    scores = tl.where(seen, tl.where(scores > 1e30, 1e30, scores), float("-inf"))  # infinite ones are no NaN
    largest = tl.maximum(tl.max(scores, 1), 0.0)  # of the kept blocks' sum and these scores, over the former
    weights = tl.exp2(scores - largest[:, None])
    slopes = weights * (tl.dot(grad, tl.trans(v), input_precision=PRECISION) - delta[:, None])
    return tl.sum(tl.sum(slopes, 1) / (tl.exp2(-largest) + tl.sum(weights, 1)))


@triton.jit
def _query_grad_kernel(q, k, v, grad, lse, delta, counts, index, spans, gate, dq, dgate, scale, heads, groups, queries,
                       keys, q_blocks, k_blocks,
                       stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh,
                       stride_vs,
                       DIM: tl.constexpr, DIM_PADDED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
                       CAUSAL: tl.constexpr,
                       RAGGED: tl.constexpr, GATED: tl.constexpr, AUDIT: tl.constexpr, PRECISION: tl.constexpr):
    "Gradients of one block of queries, and of the gate of each of its kept blocks; in an audit, what dropped ones get."
    q_block, pair, batch, head = _place(q_blocks, heads)
    line, q_start = pair * q_blocks + q_block, q_block * BLOCK
    start, end, first = _span(spans, batch, keys, RAGGED)
    begin, _, _, some = _row_reach(counts, index, line, q_start, queries, k_blocks, start, end, first, BLOCK, BLOCKS,
                                   CAUSAL, RAGGED)
    q_end = tl.minimum(queries, end - first)
    q_tile = _tile(q + batch * stride_qb + head.to(tl.int64) * stride_qh, q_start, stride_qs, q_end, DIM, DIM_PADDED,
                   BLOCK)
    grad_tile = _tile(grad + pair * queries * DIM, q_start, DIM, q_end, DIM, DIM_PADDED, BLOCK)
    rows = q_start + tl.arange(0, BLOCK)
    lse_rows = tl.load(lse + pair * queries + rows, mask=rows < q_end, other=float("inf"))  # and at padding
    delta_rows = tl.load(delta + pair * queries + rows, mask=rows < q_end, other=0.0)
    k_base = k + batch * stride_kb + (head // groups).to(tl.int64) * stride_kh
    v_base = v + batch * stride_vb + (head // groups).to(tl.int64) * stride_vh
    acc = tl.zeros([BLOCK, DIM_PADDED], tl.float32)
    for i in range(begin, some):
        k_block = tl.load(index + line * k_blocks + i)
        k_tile = _tile(k_base, k_block * BLOCK, stride_ks, end, DIM, DIM_PADDED, BLOCK)
        v_tile = _tile(v_base, k_block * BLOCK, stride_vs, end, DIM, DIM_PADDED, BLOCK)
        seen = _seen(q_start + first, k_block * BLOCK, start, end, BLOCK, CAUSAL, RAGGED)
        if AUDIT:
            tl.store(dgate + line * k_blocks + k_block,
                     _change(q_tile, grad_tile, k_tile, v_tile, lse_rows, delta_rows, seen, scale, PRECISION))
        else:
            unused, slopes = _slopes(q_tile, grad_tile, k_tile, v_tile, lse_rows[:, None], delta_rows[:, None], seen,
                                     scale, GATED, PRECISION)
            if GATED:
                tl.store(dgate + line * k_blocks + k_block, tl.sum(slopes))
                slopes *= tl.load(gate + line * k_blocks + k_block).to(tl.float32)
            acc += tl.dot(slopes.to(k_tile.dtype), k_tile, input_precision=PRECISION)
    if not AUDIT: _store_tile(dq + pair * queries * DIM, acc * scale, q_start, DIM, queries, DIM, DIM_PADDED, BLOCK)


@triton.jit
def _key_grad_kernel(q, k, v, grad, lse, delta, counts, index, spans, gate, dk, dv, scale, heads, groups, queries, keys,
                     q_blocks, k_blocks,
                     stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
                     DIM: tl.constexpr, DIM_PADDED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
                     CAUSAL: tl.constexpr,
                     RAGGED: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr):
    "Gradients of one block of keys and values from one query head; where heads share keys, the caller sums them."
    k_block, pair, batch, head = _place(k_blocks, heads)
    kv_head = (head // groups).to(tl.int64)
    line, k_start, places = pair * k_blocks + k_block, k_block * BLOCK, tl.arange(0, BLOCK)
    start, end, first = _span(spans, batch, keys, RAGGED)
    begin, until = _col_reach(counts, index, line, k_start, queries, q_blocks, start, end, first, BLOCK, BLOCKS, CAUSAL)
    q_end = tl.minimum(queries, end - first)
    k_tile = _tile(k + batch * stride_kb + kv_head * stride_kh, k_start, stride_ks, end, DIM, DIM_PADDED, BLOCK)
    v_tile = _tile(v + batch * stride_vb + kv_head * stride_vh, k_start, stride_vs, end, DIM, DIM_PADDED, BLOCK)
    q_base, grad_base = q + batch * stride_qb + head.to(tl.int64) * stride_qh, grad + pair * queries * DIM
    dk_acc = tl.zeros([BLOCK, DIM_PADDED], tl.float32)
    dv_acc = tl.zeros([BLOCK, DIM_PADDED], tl.float32)
    for i in range(begin, until):
        q_block = tl.load(index + line * q_blocks + i)
        q_start = q_block * BLOCK
        rows = q_start + places
        q_tile = _tile(q_base, q_start, stride_qs, q_end, DIM, DIM_PADDED, BLOCK)
        grad_tile = _tile(grad_base, q_start, DIM, q_end, DIM, DIM_PADDED, BLOCK)
        lse_rows = tl.where(places < q_end - q_start, tl.load(lse + pair * queries + rows, mask=rows < q_end,
                                                              other=0.0), float("inf"))
        delta_rows = tl.load(delta + pair * queries + rows, mask=rows < q_end, other=0.0)
        seen = tl.trans(_seen(q_start + first, k_start, 0, end, BLOCK, CAUSAL, False))  # keys before the text: below
        weights, slopes = _slopes(k_tile, v_tile, q_tile, grad_tile, lse_rows[None, :], delta_rows[None, :], seen,
                                  scale, GATED, PRECISION)
        if GATED:
            of_block = tl.load(gate + (pair * q_blocks + q_block) * k_blocks + k_block).to(tl.float32)
            weights *= of_block
            slopes *= of_block
        dv_acc += tl.dot(weights.to(grad_tile.dtype), grad_tile, input_precision=PRECISION)
        dk_acc += tl.dot(slopes.to(q_tile.dtype), q_tile, input_precision=PRECISION)
    if RAGGED:
        of_text = (k_start + places >= start)[:, None]
        dk_acc, dv_acc = tl.where(of_text, dk_acc, 0.0), tl.where(of_text, dv_acc, 0.0)
    _store_tile(dk + pair * keys * DIM, dk_acc * scale, k_start, DIM, keys, DIM, DIM_PADDED, BLOCK)
    _store_tile(dv + pair * keys * DIM, dv_acc, k_start, DIM, keys, DIM, DIM_PADDED, BLOCK)


def _on(x: Tensor):
    "Launches go to the GPU of `x`, whichever is current."
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _rows_contiguous(*tensors: Tensor) -> list[Tensor]:
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


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


def _common(q: Tensor, k: Tensor, v: Tensor, blocks: tuple[int, int], listed: int, spans: Tensor | None,
            gate: Tensor | None, block_size: int, causal: bool) -> tuple[list, dict]:
    "What a launch needs: sizes and strides, and the compile-time settings. `listed`: blocks that a list may have."
    dim = q.shape[-1]
    sizes = [q.shape[1], q.shape[1] // k.shape[1], q.shape[2], k.shape[2], *blocks,
             *(x.stride(i) for x in (q, k, v) for i in range(3))]
    return sizes, dict(DIM=dim, DIM_PADDED=triton.next_power_of_2(dim), BLOCK=block_size,
                       BLOCKS=triton.next_power_of_2(listed), CAUSAL=causal, RAGGED=spans is not None,
                       GATED=gate is not None, PRECISION="ieee" if q.dtype == torch.float32 else "tf32")


def forward(q: Tensor, k: Tensor, v: Tensor, row_counts: Tensor, row_index: Tensor, spans: Tensor | None,
            gate: Tensor | None,
            block_size: int, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    "Output like q, and the logarithm of the weights' sum (batch, heads, queries), +inf where nothing is kept."
    q, k, v = _rows_contiguous(q, k, v)
    blocks = tuple(row_index.shape[2:])
    sizes, settings = _common(q, k, v, blocks, blocks[1], spans, gate, block_size, causal)
    gate = gate if gate is None else gate.contiguous()
    options = launch_options(_forward_kernel, q.shape[-1], q.dtype, _capability(q))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    with _on(q):
        _forward_kernel[(blocks[0] * q.shape[0] * q.shape[1],)](q, k, v, out, lse, row_counts, row_index, spans, gate,
                                                                scale, *sizes, **settings, **options)
    return out, lse


def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, row_counts: Tensor,
             row_index: Tensor, col_counts: Tensor, col_index: Tensor,
             spans: Tensor | None, gate: Tensor | None, audit_counts: Tensor | None, audit_index: Tensor | None,
             block_size: int, causal: bool, scale: float,
             ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    "Gradients of q, k, v and, where there is a gate, of it."
    q, k, v = _rows_contiguous(q, k, v)
    grad, gate = grad.contiguous(), gate if gate is None else gate.contiguous()
    blocks, kind = tuple(row_index.shape[2:]), (q.shape[-1], q.dtype, _capability(q))
    about = lambda listed: _common(q, k, v, blocks, listed, spans, gate, block_size, causal)
    (sizes, of_rows), (_, of_columns) = about(blocks[1]), about(blocks[0])
    delta = (grad.float() * out.float()).sum(-1).contiguous()
    shared, pairs = q.shape[1] != k.shape[1], q.shape[0] * q.shape[1]
    empty = lambda length, dtype: torch.empty(*q.shape[:2], length, q.shape[-1], dtype=dtype, device=q.device)
    dq, (dk, dv) = empty(q.shape[2], q.dtype), (empty(k.shape[2], torch.float32 if shared else q.dtype)
                                                for _ in range(2))
    dgate = None if gate is None else torch.zeros(gate.shape, dtype=torch.float32, device=gate.device)
    by_row = of_rows | launch_options(_query_grad_kernel, *kind)
    by_column = of_columns | launch_options(_key_grad_kernel, *kind)
    given = q, k, v, grad, lse, delta
    with _on(q):
        _query_grad_kernel[(blocks[0] * pairs,)](*given, row_counts, row_index, spans, gate, dq, dgate, scale, *sizes,
                                                 AUDIT=False, **by_row)
        _key_grad_kernel[(blocks[1] * pairs,)](*given, col_counts, col_index, spans, gate, dk, dv, scale, *sizes,
                                               **by_column)
        if audit_counts is not None:
            _query_grad_kernel[(blocks[0] * pairs,)](*given, audit_counts, audit_index, spans, gate, dq, dgate, scale,
                                                     *sizes, AUDIT=True, **by_row)
    if shared: dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2).to(k.dtype) for x in (dk, dv))
    return dq, dk, dv, None if gate is None else dgate.to(gate.dtype)
