"""The same blocks with PyTorch's FlexAttention: the competitor, and a check."""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as pytorch

from .lists import BlockLists


@lru_cache(1)
def _compiled(): return torch.compile(pytorch.flex_attention, dynamic=False)


def flex_attention(q: Tensor, k: Tensor, v: Tensor, lists: BlockLists, lengths: Tensor | None, causal: bool, scale: float) -> Tensor:
    "FlexAttention, compiled, over the kept blocks. On a CPU it has no gradient."
    if not q.is_cuda and torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise ValueError("backend 'flex' has no gradient on a CPU; use 'cpu'")
    blocks = lists.block_mask()
    size = lists.block_size

    def visible(b, h, i, j):
        seen = blocks[b, h, i // size, j // size]
        if causal: seen = seen & (j <= i)
        if lengths is not None: seen = seen & (i < lengths[b]) & (j < lengths[b])
        return seen

    mask = pytorch.create_block_mask(visible, *lists.row_counts.shape[:2], lists.seq_len, lists.seq_len, device=q.device, BLOCK_SIZE=size)
    out = _compiled()(q, k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    if lengths is not None: out = out.masked_fill((torch.arange(lists.seq_len, device=q.device) >= lengths[:, None])[:, None, :, None], 0)
    return out
