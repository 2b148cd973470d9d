"""Block-sparse attention written out densely, in any precision: what every backend is compared with."""

import torch
from torch import Tensor


def spread(blocks: Tensor, seq_len: int, block_size: int) -> Tensor:
    "A value for each block (..., q_blocks, k_blocks) to one for each pair of query and key (..., seq, seq)."
    return blocks.repeat_interleave(block_size, -1).repeat_interleave(block_size, -2)[..., :seq_len, :seq_len]


def visible(seq_len: int, lengths: Tensor | None, causal: bool, device: torch.device) -> Tensor:
    "Which query may see which key, blocks apart: (batch or 1, 1, seq, seq) bool."
    mask = torch.ones(1, 1, seq_len, seq_len, dtype=torch.bool, device=device)
    if causal: mask = mask.tril()
    if lengths is not None:
        inside = torch.arange(seq_len, device=device) < lengths[:, None]
        mask = mask & inside[:, None, :, None] & inside[:, None, None, :]
    return mask


def dense_attention(
    q: Tensor,  # (batch, heads, seq, head_dim)
    k: Tensor,  # (batch, kv_heads, seq, head_dim)
    v: Tensor,
    block_mask: Tensor,  # (batch, heads, q_blocks, k_blocks) bool
    block_size: int,
    *,
    lengths: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    gate: Tensor | None = None,  # (batch, heads, q_blocks, k_blocks), multiplies the unnormalised weights of a block
    audit: Tensor | None = None,  # (batch, heads, q_blocks, k_blocks) bool: dropped blocks that also give dL/dgate
) -> Tensor:  # (batch, heads, seq, head_dim); a query that sees no key gives zeros
    "Differentiable by autograd. An audited block has the weight 0 and the gradient that it would have at that weight."
    seq, groups = q.shape[2], q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    seen = visible(seq, lengths, causal, q.device)
    kept = asked = spread(block_mask, seq, block_size) & seen
    if gate is not None: kept = kept & (spread(gate, seq, block_size) != 0)
    if audit is not None: asked = asked | spread(audit, seq, block_size) & seen
    largest = scores.detach().masked_fill(~kept, -torch.inf).amax(-1, keepdim=True).clamp(min=torch.finfo(q.dtype).min)
    weights = (scores - largest).masked_fill(~kept, -torch.inf).exp()
    if gate is not None:  # closed and audited blocks weigh nothing, and have a gradient
        closed = (scores - largest).masked_fill(~(asked & ~kept & kept.any(-1, keepdim=True)),
                                                -torch.inf).clamp(max=80).exp()
        weights = weights * spread(gate, seq, block_size) + closed * spread(gate - gate.detach(), seq, block_size)
    total = weights.sum(-1, keepdim=True)
    return (weights / total.masked_fill(total == 0, 1)).masked_fill(total == 0, 0).to(v.dtype) @ v
