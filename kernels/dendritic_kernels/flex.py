"""The same blocks with PyTorch's FlexAttention: the competitor, and a check."""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as pytorch

from .lists import BlockLists


@lru_cache(1)
def _compiled(): return torch.compile(pytorch.flex_attention, dynamic=False)


def block_mask(
    lists: BlockLists, spans: Tensor | None = None,  # (batch, 3), see `reference.visible`
    causal: bool = False,
) -> pytorch.BlockMask:
    "The same lists as FlexAttention wants them. Without spans, causality and a ragged end no element is tested."
    sizes = queries, keys = lists.query_len, lists.seq_len
    if spans is None and not causal and keys % lists.block_size == 0:
        return pytorch.BlockMask.from_kv_blocks(torch.zeros_like(lists.row_counts), lists.row_index.clone(),
                                                lists.row_counts, lists.row_index, BLOCK_SIZE=lists.block_size,
                                                seq_lengths=sizes)

    def visible(b, h, i, j):
        seen = (i < queries) & (j < keys)
        if spans is None: return seen & (j <= i) if causal else seen
        start, end, position = spans[b, 0], spans[b, 1], spans[b, 2] + i
        seen = seen & (position >= start) & (position < end) & (j >= start) & (j < end)
        return seen & (j <= position) if causal else seen

    return pytorch.BlockMask.from_kv_blocks(lists.row_counts, lists.row_index, BLOCK_SIZE=lists.block_size,
                                            mask_mod=visible, seq_lengths=sizes)


def flex_attention(q: Tensor, k: Tensor, v: Tensor, mask: pytorch.BlockMask, scale: float,
                   spans: Tensor | None = None) -> Tensor:
    "FlexAttention, compiled, over the kept blocks. On a CPU it has no gradient."
    if not q.is_cuda and torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise ValueError("backend 'flex' has no gradient on a CPU; use 'cpu'")
    out = _compiled()(q, k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    if spans is None: return out
    starts, ends, position = spans[:, :1], spans[:, 1:2], spans[:, 2:] + torch.arange(q.shape[2], device=q.device)
    return out.masked_fill(((position < starts) | (position >= ends))[:, None, :, None], 0)
