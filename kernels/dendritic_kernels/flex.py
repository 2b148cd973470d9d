"""The same blocks with PyTorch's FlexAttention: the competitor, and a check."""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as pytorch

from .lists import BlockLists


@lru_cache(1)
def _compiled(): return torch.compile(pytorch.flex_attention, dynamic=False)


def block_mask(lists: BlockLists, lengths: Tensor | None = None, causal: bool = False) -> pytorch.BlockMask:
    "The same lists as FlexAttention wants them. Without lengths, causality and a ragged end no element is tested."
    length = lists.seq_len
    if lengths is None and not causal and length % lists.block_size == 0:
        return pytorch.BlockMask.from_kv_blocks(torch.zeros_like(lists.row_counts), lists.row_index.clone(),
                                                lists.row_counts, lists.row_index, BLOCK_SIZE=lists.block_size,
                                                seq_lengths=(length, length))

    def visible(b, h, i, j):
        seen = (i < length) & (j < length)
        if causal: seen = seen & (j <= i)
        if lengths is not None: seen = seen & (i < lengths[b]) & (j < lengths[b])
        return seen

    return pytorch.BlockMask.from_kv_blocks(lists.row_counts, lists.row_index, BLOCK_SIZE=lists.block_size,
                                            mask_mod=visible, seq_lengths=(length, length))


def flex_attention(q: Tensor, k: Tensor, v: Tensor, mask: pytorch.BlockMask, scale: float,
                   lengths: Tensor | None = None) -> Tensor:
    "FlexAttention, compiled, over the kept blocks. On a CPU it has no gradient."
    if not q.is_cuda and torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise ValueError("backend 'flex' has no gradient on a CPU; use 'cpu'")
    out = _compiled()(q, k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    if lengths is not None:
        out = out.masked_fill((torch.arange(q.shape[2], device=q.device) >= lengths[:, None])[:, None, :, None], 0)
    return out
