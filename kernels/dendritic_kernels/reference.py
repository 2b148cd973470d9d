"""Block-sparse attention written out densely, in any precision: what every backend is compared with."""

import torch
from torch import Tensor


def spread(blocks: Tensor, queries: int, keys: int, block_size: int) -> Tensor:
    "A value for each block (..., q_blocks, k_blocks) to one for each pair of query and key (..., queries, keys)."
    return blocks.repeat_interleave(block_size, -1).repeat_interleave(block_size, -2)[..., :queries, :keys]


def visible(
    queries: int, keys: int, spans: Tensor | None,  # (batch, 3): the first key, the end of the keys, the first query
    causal: bool, device: torch.device,
) -> Tensor:  # (batch or 1, 1, queries, keys) bool
    """Which query may see which key, blocks apart.

    A query stands at its number plus that of the first query. Keys and queries that stand before a text's first key or
    at its end or later are padding: they see nothing and are not seen.
    """
    if spans is None: spans = torch.tensor([[0, keys, 0]], device=device)
    start, end, first = spans[:, :, None].unbind(1)  # (batch, 1)
    key = torch.arange(keys, device=device)[None]
    query = first + torch.arange(queries, device=device)
    of_text = lambda x: (start <= x) & (x < end)
    seen = of_text(query)[:, :, None] & of_text(key)[:, None]
    if causal: seen = seen & (key[:, None] <= query[:, :, None])
    return seen[:, None]


def dense_attention(
    q: Tensor,  # (batch, heads, queries, head_dim)
    k: Tensor,  # (batch, kv_heads, keys, head_dim)
    v: Tensor,
    block_mask: Tensor,  # (batch, heads, q_blocks, k_blocks) bool
    block_size: int,
    *,
    spans: Tensor | None = None,  # (batch, 3), see `visible`
    causal: bool = False,
    scale: float | None = None,
    gate: Tensor | None = None,  # (batch, heads, q_blocks, k_blocks), multiplies the unnormalised weights of a block
    audit: Tensor | None = None,  # (batch, heads, q_blocks, k_blocks) bool: dropped blocks whose gates learn too
) -> Tensor:  # (batch, heads, queries, head_dim); a query that sees no key gives zeros
    """Differentiable by autograd. An audited block weighs nothing, and its gate's gradient is what keeping it would add
    to sum(grad * out). That is bounded, where the derivative at a closed gate grows exponentially with the scores of
    what is left out."""
    queries, keys, groups = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    by_pair = lambda blocks: spread(blocks, queries, keys, block_size)
    seen = visible(queries, keys, spans, causal, q.device)
    listed = kept = by_pair(block_mask) & seen
    if gate is not None: kept = kept & (by_pair(gate) != 0)
    largest = scores.detach().masked_fill(~kept, -torch.inf).amax(-1, keepdim=True).clamp(min=torch.finfo(q.dtype).min)
    weights = (scores - largest).masked_fill(~kept, -torch.inf).exp()
    if gate is not None:  # closed blocks weigh nothing, and have a gradient
        closed = (scores - largest).masked_fill(~(listed & ~kept & kept.any(-1, keepdim=True)),
                                                -torch.inf).clamp(max=80).exp()
        weights = weights * by_pair(gate) + closed * by_pair(gate - gate.detach())
    total = weights.sum(-1, keepdim=True)
    out = (weights / total.masked_fill(total == 0, 1)).masked_fill(total == 0, 0).to(v.dtype) @ v
    if audit is None: return out
    audited = (by_pair(audit) & seen & (total != 0)).detach()
    opening = (gate - gate.detach()).repeat_interleave(block_size, 2)[:, :, :queries]  # zeros
    for block, first in enumerate(range(0, keys, block_size)):
        these = slice(first, first + block_size)
        logs = (scores[..., these] - largest).detach().masked_fill(~audited[..., these], -torch.inf)
        most = logs.amax(-1, keepdim=True).clamp(min=0)
        alone = (logs - most).exp()
        whole = alone.sum(-1, keepdim=True) + total.detach() * (-most).exp()
        change = (alone.to(v.dtype) @ v[:, :, these] - alone.sum(-1, keepdim=True) * out).detach()
        out = out + opening[..., block, None] * (change / whole.masked_fill(whole == 0, 1)).to(out)
    return out
