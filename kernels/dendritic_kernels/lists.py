"""Which blocks of an attention matrix are kept, as lists that kernels can walk."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class BlockLists:
    """Kept blocks of a block-sparse attention matrix over one sequence length.

    A row of blocks is one block of queries, a column one block of keys. Lists ascend; entries from a list's
    count on are valid block numbers that nothing reads, so a kernel that runs past a list stays in bounds.
    All tensors are int32 on one device. A `BlockLists` made by hand is checked, which waits for the device;
    `from_mask` and `from_scores` do not wait.
    """

    row_counts: Tensor  # (batch, heads, q_blocks) kept key blocks of each query block
    row_index: Tensor  # (batch, heads, q_blocks, k_blocks) their numbers, ascending
    col_counts: Tensor  # (batch, heads, k_blocks) kept query blocks of each key block
    col_index: Tensor  # (batch, heads, k_blocks, q_blocks) their numbers, ascending
    seq_len: int  # tokens; the last block may be ragged
    block_size: int  # tokens in a block

    def __post_init__(self):
        _check_sizes(self.seq_len, self.block_size)
        blocks = -(-self.seq_len // self.block_size)
        if self.row_counts.dim() != 3:
            raise ValueError(f"row_counts must be (batch, heads, q_blocks)"
                             f", got {tuple(self.row_counts.shape)}")
        batch, heads = self.row_counts.shape[:2]
        for name, ending in (("row_counts", (blocks,)), ("row_index", (blocks, blocks)), ("col_counts", (blocks,)),
                             ("col_index", (blocks, blocks))):
            tensor, shape = getattr(self, name), (batch, heads, *ending)
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name} must be {shape} for {self.seq_len} tokens in blocks of {self.block_size}"
                                 f", got {tuple(tensor.shape)}")
            if tensor.dtype != torch.int32: raise TypeError(f"{name} must be int32, got {tensor.dtype}")
            if tensor.device != self.row_counts.device:
                raise ValueError(f"all lists must be on one device"
                                 f", got {self.row_counts.device} and {tensor.device}")
            if tensor.numel() and not (0 <= int(tensor.min()) and int(tensor.max()) <= blocks - (name[4:] == "index")):
                raise ValueError(f"{name} must hold numbers of {blocks} blocks"
                                 f", got {int(tensor.min())} to {int(tensor.max())}")
        for name in ("row_counts", "row_index", "col_counts", "col_index"):
            object.__setattr__(self, name, getattr(self, name).contiguous())
        by_row = _mask(self.row_counts, self.row_index, "row_index")
        by_col = _mask(self.col_counts, self.col_index, "col_index")
        if not torch.equal(by_row, by_col.transpose(-1, -2)):
            raise ValueError("row lists and column lists must keep the same blocks")

    @classmethod
    def from_mask(cls, block_mask: Tensor, seq_len: int, block_size: int = 64) -> BlockLists:
        """Lists of the true entries of `block_mask` (batch, heads, q_blocks, k_blocks), bool.

        On a GPU one launch and no wait. Raises `TypeError` or `ValueError` for another type or shape.
        """
        if not isinstance(block_mask, Tensor):
            raise TypeError(f"block_mask must be a tensor"
                            f", got {type(block_mask).__name__}")
        if block_mask.dtype != torch.bool: raise TypeError(f"block_mask must be bool, got {block_mask.dtype}")
        return cls._above(block_mask, 0, seq_len, block_size, "block_mask")

    @classmethod
    def from_scores(cls, scores: Tensor, threshold: float, seq_len: int | None = None,
                    block_size: int = 64) -> BlockLists:
        """Lists of the blocks whose score is above `threshold`; `scores` (batch, heads, q_blocks, k_blocks) are a
        gate's.

        On a GPU one launch and no wait. A score that is NaN does not keep its block. `seq_len` None: all blocks are
        full.
        """
        if not isinstance(scores, Tensor) or not scores.is_floating_point():
            raise TypeError(f"scores must be a floating-point tensor"
                            f", got {getattr(scores, 'dtype', type(scores).__name__)}")
        if seq_len is None and scores.dim() == 4: seq_len = scores.shape[-1] * block_size
        return cls._above(scores.detach(), threshold, seq_len, block_size, "scores")

    @classmethod
    def _above(cls, scores: Tensor, threshold: float, seq_len: int, block_size: int, name: str) -> BlockLists:
        "Lists of what is above the threshold in a mask or in scores."
        if scores.dim() != 4:
            raise ValueError(f"{name} must be (batch, heads, q_blocks, k_blocks)"
                             f", got {tuple(scores.shape)}")
        _check_sizes(seq_len, block_size)
        blocks = -(-seq_len // block_size)
        if tuple(scores.shape[2:]) != (blocks, blocks):
            expected = f"(batch, heads, {blocks}, {blocks}) for {seq_len} tokens in blocks of {block_size}"
            raise ValueError(f"{name} must be {expected}, got {tuple(scores.shape)}")
        if scores.is_cuda and scores.dtype != torch.float64:
            from .triton_kernels import build_lists
            dtype = scores.dtype if scores.is_floating_point() else None
            rounded = torch.tensor(threshold, dtype=dtype).item()
            return cls._trusted(*build_lists(scores, rounded), seq_len, block_size)
        mask = scores > threshold
        return cls._trusted(*_lists(mask), *_lists(mask.transpose(-1, -2)), seq_len, block_size)

    @classmethod
    def _trusted(cls, row_counts: Tensor, row_index: Tensor, col_counts: Tensor, col_index: Tensor, seq_len: int,
                 block_size: int) -> BlockLists:
        "Without the checks, which would wait for the device."
        lists = object.__new__(cls)
        for name, value in zip(cls.__dataclass_fields__,
                               (row_counts, row_index, col_counts, col_index, seq_len, block_size)):
            object.__setattr__(lists, name, value)
        return lists

    @property
    def num_blocks(self) -> int: return self.row_index.shape[-1]

    @property
    def device(self) -> torch.device: return self.row_counts.device

    def density(self) -> float:
        "Share of kept blocks. Waits for the device."
        return self.row_counts.sum().item() / max(1, self.row_index.numel())

    def block_mask(self) -> Tensor:  # (batch, heads, q_blocks, k_blocks) bool
        "The mask that these lists stand for."
        return _scatter(self.row_counts, self.row_index)


def _check_sizes(seq_len: int, block_size: int):
    for name, value in (("seq_len", seq_len), ("block_size", block_size)):
        if type(value) is not int: raise TypeError(f"{name} must be an int, got {value!r}")
        if value < 1: raise ValueError(f"{name} must be at least 1, got {value}")


def _lists(mask: Tensor) -> tuple[Tensor, Tensor]:
    "Counts and indices along the last dimension: true places first, both kinds ascending."
    order = mask.logical_not().to(torch.uint8).sort(dim=-1, stable=True).indices
    return mask.sum(-1, dtype=torch.int32), order.int().contiguous()


def _scatter(counts: Tensor, index: Tensor) -> Tensor:
    places = torch.arange(index.shape[-1], device=index.device)
    return torch.zeros(index.shape, dtype=torch.int32,
                       device=index.device).scatter_add_(-1, index.long(), (places < counts[..., None]).int()) > 0


def _mask(counts: Tensor, index: Tensor, name: str) -> Tensor:
    places = torch.arange(index.shape[-1], device=index.device)
    if (((index[..., 1:] <= index[..., :-1]) & (places[1:] < counts[..., None])).any()):
        raise ValueError(f"{name} must ascend within each list, without repeats")
    return _scatter(counts, index)
