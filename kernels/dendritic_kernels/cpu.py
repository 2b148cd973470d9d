"""Block-sparse attention on a CPU: kept key blocks are gathered for a few rows of blocks at a time.

A chunk has rows with the same number of kept blocks, and a bounded size. Where every score of it counts
and no gate weighs blocks, PyTorch's fused dense attention computes it; else ordinary batched matrix products do.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 2 ** 20  # attention scores in a chunk
LARGEST = 80.0  # logarithm of the weight that a closed block may seem to have, so that its gate's gradient stays finite


@dataclass
class _Problem:
    "One call: its operands cut into blocks, and the rows of blocks that keep something."
    q: Tensor  # (batch * heads * query blocks, block_size, head_dim)
    k: Tensor  # (batch * kv_heads * key blocks, block_size, head_dim)
    v: Tensor
    counts: Tensor  # (batch * heads * query blocks,) kept blocks that a row can see
    index: Tensor  # (batch * heads * blocks, key blocks), those first
    spans: Tensor | None  # (batch, 3) first key, end of the keys, first query; None: all blocks are full
    shape: tuple[int, int, int, int, int, int]  # batch, heads, kv_heads, query blocks, key blocks, block_size
    causal: bool


@dataclass
class _Chunk:
    rows: Tensor  # (rows,) numbers of rows of blocks
    keys: Tensor  # (rows * kept,) numbers of their key blocks in `_Problem.k`
    k: Tensor  # (rows, kept * block_size, head_dim) these; the memory is the next chunk's as well
    v: Tensor
    index: Tensor  # (rows, kept) numbers of the key blocks within their sequence
    hidden: Tensor | None  # (rows, block_size or 1, kept * block_size) bool: scores that do not count


def visible_part(counts: Tensor, index: Tensor, spans: Tensor | None, queries: int, block_size: int,
                 causal: bool) -> tuple[Tensor | int, Tensor]:
    """How many of each row's kept blocks stand before its text, and how many follow that its queries can see: not past
    the text's end, not after them. Lists ascend, so these stand together."""
    if spans is None and not causal: return 0, counts
    places = torch.arange(index.shape[-1], device=index.device)
    kept = places < counts[..., None]
    first = torch.arange(index.shape[2], device=index.device) * block_size  # position of each row's first query
    if spans is None: return 0, ((index * block_size <= first[:, None]) & kept).sum(-1)
    starts, ends, offsets = (x[:, None, None] for x in spans.unbind(1))
    last = offsets + (first + block_size).clamp(max=queries)
    last, alive = last.minimum(ends), (offsets + first < ends) & (last > starts)
    begins, reach = index * block_size, torch.where(alive, last if causal else ends, 0)[..., None]
    before = (begins + block_size <= starts[..., None]) & kept
    return before.sum(-1), ((begins < reach) & kept & ~before).sum(-1)


def _padding(spans: Tensor, number: int, first: Tensor | int = 0) -> Tensor:  # (batch, 1, number, 1) bool
    "Which of `number` positions from `first` (batch, 1) on are padding."
    position = first + torch.arange(number)
    return ((position < spans[:, :1]) | (position >= spans[:, 1:2]))[:, None, :, None]


def _problem(q: Tensor, k: Tensor, v: Tensor, counts: Tensor, index: Tensor, spans: Tensor | None, block_size: int,
             causal: bool) -> _Problem:
    batch, heads, queries, _ = q.shape
    before, counts = visible_part(counts, index, spans, queries, block_size, causal)
    if spans is not None:
        q = q.masked_fill(_padding(spans, queries, spans[:, 2:]), 0)  # padding may be NaN
        k, v = (x.masked_fill(_padding(spans, k.shape[2]), 0) for x in (k, v))
        if spans[:, 0].any():
            index = index.gather(-1, (before[..., None] + torch.arange(index.shape[-1])).clamp(max=index.shape[-1] - 1))
    elif queries % block_size: spans = torch.tensor([0, queries, 0]).repeat(batch, 1)
    return _Problem(*(_blocks(x, block_size) for x in (q, k, v)), counts.flatten().long(), index.flatten(0, 2), spans,
                    (batch, heads, k.shape[1], *index.shape[2:], block_size), causal)


def _blocks(x: Tensor, block_size: int) -> Tensor:
    "(batch, heads, seq, head_dim) to (batch * heads * blocks, block_size, head_dim), the last block filled with zeros."
    return F.pad(x, (0, 0, 0, -x.shape[2] % block_size)).reshape(-1, block_size, x.shape[-1])


def _whole(x: Tensor, like: Tensor) -> Tensor:
    "The inverse of `_blocks`."
    return x.reshape(*like.shape[:2], -1, like.shape[-1])[:, :, :like.shape[2]].to(like.dtype).contiguous()


def _chunks(p: _Problem) -> Iterator[_Chunk]:
    "Rows of blocks with something kept, those with few first."
    _, heads, kv_heads, rows_of_head, blocks, size = p.shape
    order = p.counts.argsort(stable=True)
    many = p.counts[order].tolist()
    first, space = bisect_right(many, 0), [x.new_empty(0) for x in (p.k, p.v)]
    while first < len(many):
        kept = many[first]
        last = min(bisect_right(many, kept), first + max(1, CHUNK // (kept * size * size)))
        rows, chosen = order[first:last], p.index[order[first:last], :kept]
        kv = rows // (rows_of_head * heads) * kv_heads + rows // rows_of_head % heads // (heads // kv_heads)
        keys = (kv[:, None] * blocks + chosen).flatten()
        if len(space[0]) < len(keys): space = [x.new_empty(len(keys), *x.shape[1:]) for x in (p.k, p.v)]
        k, v = (torch.index_select(x, 0, keys, out=s[:len(keys)]).view(len(rows), -1, x.shape[-1]) for x,
                s in zip((p.k, p.v), space))
        yield _Chunk(rows, keys, k, v, chosen, _hidden(p, rows, chosen))
        first = last


def _hidden(p: _Problem, rows: Tensor, index: Tensor) -> Tensor | None:
    "Scores that do not count: keys at padding, keys after their query. None where all count."
    if p.spans is None and not p.causal: return None
    _, heads, _, blocks, _, size = p.shape
    first, hidden = rows % blocks * size, None
    if p.spans is not None:
        starts, ends, offsets = p.spans[rows // (blocks * heads)][:, :, None].unbind(1)
        if not p.causal and not ((index[:, -1:] * size + size > ends) | (index[:, :1] * size < starts)).any():
            return None
    keys = (index[:, :, None] * size + torch.arange(size)).flatten(1)
    if p.spans is not None: hidden, first = ((keys >= ends) | (keys < starts))[:, None], first + offsets[:, 0]
    if p.causal:
        later = keys[:, None] > first[:, None, None] + torch.arange(size)[:, None]
        hidden = later if hidden is None else hidden | later
    return hidden


def _scores(p: _Problem, chunk: _Chunk, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    "Scores (rows, block_size, kept * block_size) of a chunk, and its queries, keys and values."
    q, k, v = p.q[chunk.rows], chunk.k, chunk.v
    if q.dtype in (torch.float16, torch.bfloat16): q, k, v = q.float(), k.float(), v.float()
    scores = torch.baddbmm(q.new_empty(len(q), q.shape[1], k.shape[1]), q, k.transpose(1, 2), beta=0, alpha=scale)
    if chunk.hidden is not None: scores.masked_fill_(chunk.hidden, -torch.inf)
    return scores, q, k, v


def _by_block(scores: Tensor, size: int) -> Tensor:  # (rows, block_size, kept, block_size)
    return scores.view(*scores.shape[:2], -1, size)


def forward(q: Tensor, k: Tensor, v: Tensor, row_counts: Tensor, row_index: Tensor, spans: Tensor | None,
            gate: Tensor | None,
            block_size: int, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    "Output like q, and the logarithm of the weights' sum (batch, heads, seq), +inf where nothing is kept."
    p = _problem(q, k, v, row_counts, row_index, spans, block_size, causal)
    wide = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype
    out, lse = torch.zeros(p.q.shape, dtype=q.dtype), torch.full(p.q.shape[:2], torch.inf, dtype=wide)
    for chunk in _chunks(p):
        if gate is None and chunk.hidden is None:
            operands = (x[:, None] for x in (p.q[chunk.rows], chunk.k, chunk.v))
            done, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*operands, 0.0, False, scale=scale)
            out[chunk.rows], lse[chunk.rows] = done[:, 0], sums[:, 0].to(wide)
            continue
        scores, _, _, v_kept = _scores(p, chunk, scale)
        if gate is not None:
            _by_block(scores, block_size).add_(gate.flatten(0, 2)[chunk.rows[:, None],
                                                                  chunk.index].to(wide).log()[:, None, :, None])
        largest = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(wide).min)
        weights = scores.sub_(largest).exp_()
        total = weights.sum(-1, keepdim=True)
        out[chunk.rows] = torch.bmm(weights, v_kept).div_(total.masked_fill(total == 0, 1)).to(out.dtype)
        lse[chunk.rows] = torch.where(total == 0, torch.inf, largest + total.log()).squeeze(-1)
    out, lse = _whole(out, q), lse.view(*q.shape[:2], -1)[..., :q.shape[2]].contiguous()
    if spans is not None:
        padding = _padding(spans, q.shape[2], spans[:, 2:])
        out, lse = out.masked_fill_(padding, 0), lse.masked_fill_(padding.squeeze(-1), torch.inf)
    return out, lse


def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, row_counts: Tensor,
             row_index: Tensor, spans: Tensor | None,
             gate: Tensor | None, audit_counts: Tensor | None, audit_index: Tensor | None, block_size: int,
             causal: bool, scale: float,
             ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    "Gradients of q, k, v and, where there is a gate, of it."
    p = _problem(q, k, v, row_counts, row_index, spans, block_size, causal)
    if spans is not None: grad = grad.masked_fill(_padding(spans, q.shape[2], spans[:, 2:]), 0)
    wide = lse.dtype
    grads, delta = _blocks(grad, block_size), _blocks((grad.to(wide) * out.to(wide)).sum(-1, keepdim=True), block_size)
    outs, lse = _blocks(out, block_size), _blocks(lse[..., None], block_size)
    dq, dk, dv = (torch.zeros(x.shape, dtype=wide) for x in (p.q, p.k, p.v))
    dgate = None if gate is None else torch.zeros(gate.shape, dtype=wide).flatten(0, 2)

    def logs_and_slope(chunk: _Chunk) -> tuple[Tensor, ...]:
        "Logarithms of weights without the gate, dL/dweight, and the chunk's operands."
        scores, q_kept, k_kept, v_kept = _scores(p, chunk, scale)
        grad_kept = grads[chunk.rows].to(wide)
        slope = torch.bmm(grad_kept, v_kept.transpose(1, 2)).sub_(delta[chunk.rows])
        return scores.sub_(lse[chunk.rows]), slope, grad_kept, q_kept, k_kept

    def set_gate(chunk: _Chunk, slopes: Tensor):  # (rows, block_size, kept)
        dgate[chunk.rows] = dgate[chunk.rows].scatter(1, chunk.index.long(), slopes.sum(1))

    def add_to_keys(chunk: _Chunk, of_k: Tensor, of_v: Tensor, scale: float):
        dk.index_add_(0, chunk.keys, of_k.reshape(-1, block_size, q.shape[-1]).to(wide), alpha=scale)
        dv.index_add_(0, chunk.keys, of_v.reshape(-1, block_size, q.shape[-1]).to(wide))

    for chunk in _chunks(p):
        if gate is None and chunk.hidden is None:
            operands = (x[:, None] for x in (grads[chunk.rows], p.q[chunk.rows], chunk.k, chunk.v, outs[chunk.rows],
                                             lse[chunk.rows].squeeze(-1)))
            flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
            of_q, of_k, of_v = flash_backward(*operands, 0.0, False, scale=scale)
            dq[chunk.rows] = of_q[:, 0].to(wide)
            add_to_keys(chunk, of_k, of_v, 1.0)
            continue
        logs, slope, grad_kept, q_kept, k_kept = logs_and_slope(chunk)
        weights = (logs if gate is None else logs.clamp_(max=LARGEST)).exp_()
        dscores = slope.mul_(weights)
        if gate is not None:
            block_slopes = _by_block(dscores, block_size)
            set_gate(chunk, block_slopes.sum(3))
            of_block = gate.flatten(0, 2)[chunk.rows[:, None], chunk.index].to(wide)[:, None, :, None]
            block_slopes.mul_(of_block)
            _by_block(weights, block_size).mul_(of_block)
        dq[chunk.rows] = torch.bmm(dscores, k_kept).mul_(scale)
        add_to_keys(chunk, torch.bmm(dscores.transpose(1, 2), q_kept), torch.bmm(weights.transpose(1, 2), grad_kept),
                    scale)
    if audit_counts is not None:
        audited = _problem(q, k, v, audit_counts, audit_index, spans, block_size, causal)
        for chunk in _chunks(audited):
            logs, slope, *_ = logs_and_slope(chunk)
            logs, slope = _by_block(logs, block_size), _by_block(slope, block_size)
            logs.clamp_(max=1e30)  # infinite scores of dropped blocks are no NaN
            largest = logs.amax(-1, keepdim=True).clamp_(min=0)  # of the kept blocks' sum and these scores
            weights = logs.sub_(largest).exp_()
            set_gate(chunk, slope.mul_(weights).sum(-1).div_(weights.sum(-1).add_(largest.neg_().exp_()[..., 0])))
    return _whole(dq, q), _whole(dk, k), _whole(dv, v), None if gate is None else dgate.view(gate.shape).to(gate.dtype)
