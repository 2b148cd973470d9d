"""Lists of kept blocks: what they hold, and what is refused."""

import pytest
import torch
from dendritic_kernels import BlockLists
from hypothesis import given
from hypothesis import strategies as st


@given(seed=st.integers(0, 10**6), blocks=st.integers(1, 9), density=st.floats(0, 1))
def test_lists_hold_the_mask(seed, blocks, density):
    mask = torch.rand(2, 3, blocks, blocks, generator=torch.Generator().manual_seed(seed)) < density
    lists = BlockLists.from_mask(mask, blocks * 4 - 1, 4)
    assert torch.equal(lists.block_mask(), mask)
    for counts, index, lines in ((lists.row_counts, lists.row_index, mask),
                                 (lists.col_counts, lists.col_index, mask.transpose(-1, -2))):
        for count, numbers, line in zip(counts.flatten(), index.flatten(0, 2), lines.reshape(-1, blocks)):
            assert numbers[:count].tolist() == line.nonzero().flatten().tolist()
            assert sorted(numbers.tolist()) == list(range(blocks))  # what stands past the count is a block too
    assert lists.row_counts.dtype == lists.col_index.dtype == torch.int32
    assert lists.density() == pytest.approx(mask.float().mean().item())
    # passes its own checks
    BlockLists(lists.row_counts, lists.row_index, lists.col_counts, lists.col_index, blocks * 4 - 1, 4)


def test_fewer_queries_than_keys():
    mask = torch.tensor([[[[True, False, True], [False, True, True]]]])
    lists = BlockLists.from_mask(mask, 11, 4, query_len=6)
    assert torch.equal(lists.block_mask(), mask)
    assert lists.col_counts.tolist() == [[[1, 1, 2]]] and lists.col_index.shape == (1, 1, 3, 2)
    BlockLists(*(getattr(lists, name) for name in BlockLists.__dataclass_fields__))  # passes its own checks
    assert torch.equal(BlockLists.from_scores(mask.float(), 0.5, 11, 4, 6).block_mask(), mask)
    with pytest.raises(ValueError, match=r"\(batch, heads, 3, 3\) for 9 queries and 11 keys"):
        BlockLists.from_mask(mask, 11, 4, query_len=9)


def test_from_scores():
    scores = torch.tensor([[[[0.1, 0.9], [float("nan"), 0.5]]]])
    assert BlockLists.from_scores(scores, 0.4).block_mask().tolist() == [[[[False, True], [False, True]]]]
    assert BlockLists.from_scores(scores, 0.4).seq_len == 128
    assert BlockLists.from_scores(scores, 0.4, 100).seq_len == 100


mask = torch.ones(1, 1, 2, 2, dtype=torch.bool)


@pytest.mark.parametrize("arguments, error, message", [
    ((mask.tolist(), 8, 4), TypeError, "block_mask must be a tensor"),
    ((mask.int(), 8, 4), TypeError, "must be bool"),
    ((mask[0], 8, 4), ValueError, r"\(batch, heads, q_blocks, k_blocks\)"),
    ((mask, 9, 4), ValueError, r"\(batch, heads, 3, 3\) for 9 tokens"),
    ((mask, 0, 4), ValueError, "seq_len must be at least 1"),
    ((mask, 8, 0), ValueError, "block_size must be at least 1"),
    ((mask, 8.0, 4), TypeError, "seq_len must be an int"),
])
def test_refused_masks(arguments, error, message):
    with pytest.raises(error, match=message): BlockLists.from_mask(*arguments)


def test_scores_of_another_shape_are_refused():
    for scores, seq_len in ((torch.zeros(2, 2), None), (torch.zeros(1, 1, 2, 3), None), (torch.zeros(1, 1, 2, 2), 129)):
        with pytest.raises(ValueError, match="scores must be"): BlockLists.from_scores(scores, 0.5, seq_len)


@pytest.mark.parametrize("scores", [mask, [[0.5]], mask.int()])
def test_refused_scores(scores):
    with pytest.raises(TypeError, match="floating-point"): BlockLists.from_scores(scores, 0.5)


def by_hand(**change):
    lists = BlockLists.from_mask(torch.tensor([[[[True, False], [True, True]]]]), 8, 4)
    fields = {name: getattr(lists, name) for name in BlockLists.__dataclass_fields__}
    return BlockLists(**fields | {name: torch.tensor(value, dtype=torch.int32) if isinstance(value, list) else value
                                  for name, value in change.items()})


@pytest.mark.parametrize("change, error, message", [
    (dict(row_counts=[[[1, 3]]]), ValueError, "must hold numbers of 2 blocks"),
    (dict(row_counts=[[[1, -1]]]), ValueError, "must hold numbers of 2 blocks"),
    (dict(row_index=[[[[0, 1], [0, 2]]]]), ValueError, "must hold numbers of 2 blocks"),
    (dict(row_index=[[[[0, 1], [1, 0]]]]), ValueError, "ascend"),
    (dict(row_index=[[[[0, 1], [1, 1]]]]), ValueError, "ascend"),
    (dict(col_counts=[[[2, 0]]]), ValueError, "same blocks"),
    (dict(row_index=torch.zeros(1, 1, 2, 2)), TypeError, "int32"),
    (dict(row_index=[[[0, 1]]]), ValueError, r"row_index must be \(1, 1, 2, 2\)"),
    (dict(row_counts=[1, 1]), ValueError, r"\(batch, heads, q_blocks\)"),
    (dict(seq_len=9), ValueError, "8 queries and 9 keys"),
    (dict(seq_len=9, query_len=9), ValueError, "9 tokens"),
    (dict(query_len=9), ValueError, "query_len must be at most seq_len, 8, got 9"),
    (dict(query_len=4), ValueError, r"row_counts must be \(1, 1, 1\) for 4 queries and 8 keys"),
])
def test_refused_lists_made_by_hand(change, error, message):
    with pytest.raises(error, match=message): by_hand(**change)
