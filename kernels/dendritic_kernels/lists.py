"""Which blocks of an attention matrix are kept, as lists that kernels can walk."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class BlockLists:
    """Kept blocks of a block-sparse attention matrix.

    A row of blocks is one block of queries, a column one block of keys. Rows are counted from the first query, so
    where queries are a later part of the sequence, a block of queries need not stand at a block of keys.
    Lists ascend; entries from a list's
    count on are valid block numbers that nothing reads, so a kernel that runs past a list stays in bounds.
    All tensors are int32 on one device. A `BlockLists` made by hand is checked, which waits for the device;
    `from_mask` and `from_scores` do not wait.
    """

    row_counts: Tensor  # (batch, heads, q_blocks) kept key blocks of each query block
    row_index: Tensor  # (batch, heads, q_blocks, k_blocks) their numbers, ascending
    col_counts: Tensor  # (batch, heads, k_blocks) kept query blocks of each key block
    col_index: Tensor  # (batch, heads, k_blocks, q_blocks) their numbers, ascending
    seq_len: int  # keys; the last block may be ragged
    block_size: int  # tokens in a block
    query_len: int | None = None  # queries, at most seq_len; None: seq_len

    def __post_init__(self):
        if self.query_len is None: object.__setattr__(self, "query_len", self.seq_len)
        rows, cols = _blocks(self.seq_len, self.block_size, self.query_len)
        if self.row_counts.dim() != 3:
            raise ValueError(f"row_counts must be (batch, heads, q_blocks)"
                             f", got {tuple(self.row_counts.shape)}")
        batch, heads = self.row_counts.shape[:2]
        for name, ending, blocks in (("row_counts", (rows,), cols), ("row_index", (rows, cols), cols),
                                     ("col_counts", (cols,), rows), ("col_index", (cols, rows), rows)):
            tensor, shape = getattr(self, name), (batch, heads, *ending)
            if tuple(tensor.shape) != shape:
                sizes = _sizes(self.seq_len, self.block_size, self.query_len)
                raise ValueError(f"{name} must be {shape} for {sizes}, got {tuple(tensor.shape)}")
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
    def from_mask(cls, block_mask: Tensor, seq_len: int, block_size: int = 64,
                  query_len: int | None = None) -> BlockLists:
        """Lists of the true entries of `block_mask` (batch, heads, q_blocks, k_blocks), bool.

        `query_len` None: as many queries as keys. On a GPU no wait, and one launch.
        Raises `TypeError` or `ValueError` for another type or shape.
        """
        if not isinstance(block_mask, Tensor):
            raise TypeError(f"block_mask must be a tensor"
                            f", got {type(block_mask).__name__}")
        if block_mask.dtype != torch.bool: raise TypeError(f"block_mask must be bool, got {block_mask.dtype}")
        return cls._above(block_mask, 0, seq_len, block_size, query_len, "block_mask")

    @classmethod
    def from_scores(cls, scores: Tensor, threshold: float, seq_len: int | None = None,
                    block_size: int = 64, query_len: int | None = None) -> BlockLists:
        """Lists of the blocks whose score is above `threshold`; `scores` (batch, heads, q_blocks, k_blocks) are a
        gate's.

        A score that is NaN does not keep its block. `seq_len` None: all blocks are full. The rest as in `from_mask`.
        """
        if not isinstance(scores, Tensor) or not scores.is_floating_point():
            raise TypeError(f"scores must be a floating-point tensor"
                            f", got {getattr(scores, 'dtype', type(scores).__name__)}")
        if seq_len is None and scores.dim() == 4: seq_len = scores.shape[-1] * block_size
        return cls._above(scores.detach(), threshold, seq_len, block_size, query_len, "scores")

    @classmethod
    def _above(cls, scores: Tensor, threshold: float, seq_len: int, block_size: int, query_len: int | None,
               name: str) -> BlockLists:
        "Lists of what is above the threshold in a mask or in scores."
        if scores.dim() != 4:
            raise ValueError(f"{name} must be (batch, heads, q_blocks, k_blocks)"
                             f", got {tuple(scores.shape)}")
        if query_len is None: query_len = seq_len
        rows, cols = _blocks(seq_len, block_size, query_len)
        if tuple(scores.shape[2:]) != (rows, cols):
            expected = f"(batch, heads, {rows}, {cols}) for {_sizes(seq_len, block_size, query_len)}"
            raise ValueError(f"{name} must be {expected}, got {tuple(scores.shape)}")
        if scores.is_cuda and scores.dtype != torch.float64:
            from .triton_kernels import build_lists
            dtype = scores.dtype if scores.is_floating_point() else None
            rounded = torch.tensor(threshold, dtype=dtype).item()
            return cls._trusted(*build_lists(scores, rounded), seq_len, block_size, query_len)
        mask = scores > threshold
        return cls._trusted(*_lists(mask), *_lists(mask.transpose(-1, -2)), seq_len, block_size, query_len)

    @classmethod
    def _trusted(cls, *values) -> BlockLists:
        "Without the checks, which would wait for the device."
        lists = object.__new__(cls)
        for name, value in zip(cls.__dataclass_fields__, values): object.__setattr__(lists, name, value)
        return lists

    @property
    def num_blocks(self) -> int: return self.row_index.shape[-1]  # of keys

    @property
    def device(self) -> torch.device: return self.row_counts.device

    def density(self) -> float:
        "Share of kept blocks. Waits for the device."
        return self.row_counts.sum().item() / max(1, self.row_index.numel())

    def block_mask(self) -> Tensor:  # (batch, heads, q_blocks, k_blocks) bool
        "The mask that these lists stand for."
        return _scatter(self.row_counts, self.row_index)


def _blocks(seq_len: int, block_size: int, query_len: int) -> tuple[int, int]:
    "Blocks of queries and of keys."
    for name, value in (("seq_len", seq_len), ("block_size", block_size), ("query_len", query_len)):
        if type(value) is not int: raise TypeError(f"{name} must be an int, got {value!r}")
        if value < 1: raise ValueError(f"{name} must be at least 1, got {value}")
    if query_len > seq_len: raise ValueError(f"query_len must be at most seq_len, {seq_len}, got {query_len}")
    return -(-query_len // block_size), -(-seq_len // block_size)


def _sizes(seq_len: int, block_size: int, query_len: int) -> str:
    "The sizes in words, for errors."
    tokens = f"{seq_len} tokens" if query_len == seq_len else f"{query_len} queries and {seq_len} keys"
    return f"{tokens} in blocks of {block_size}"


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
