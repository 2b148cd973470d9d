"""What holds for block-sparse attention whatever the backend: symmetries, the operator, and refused input."""

import pytest
import torch
from dendritic_kernels import BlockLists, attention, block_sparse_attention
from dendritic_kernels.reference import dense_attention
from problems import check, problem, results
from torch.utils.flop_counter import FlopCounterMode


def lists_of(mask, seq=37, block=8): return BlockLists.from_mask(mask, seq, block)


@pytest.fixture(params=["cpu", "dense", "sdpa"])
def backend(request): return request.param


def test_order_of_the_batch(backend):
    q, k, v, mask = problem()
    out = block_sparse_attention(q, k, v, lists_of(mask), backend=backend)
    turned = block_sparse_attention(q.flip(0), k.flip(0), v.flip(0), lists_of(mask.flip(0)), backend=backend)
    torch.testing.assert_close(turned, out.flip(0))


def test_padding_changes_nothing(backend):
    q, k, v, mask = problem(seq=24)
    out = block_sparse_attention(q, k, v, lists_of(mask, 24), backend=backend)
    pad = lambda x: torch.cat([x, torch.full_like(x[:, :, :13], 1e4)], 2)
    kept = torch.nn.functional.pad(mask, (0, 2, 0, 2), value=True)
    padded = block_sparse_attention(pad(q), pad(k), pad(v), lists_of(kept), lengths=torch.tensor([24, 24]),
                                    backend=backend)
    torch.testing.assert_close(padded[:, :, :24], out)
    assert not padded[:, :, 24:].any()


def test_a_dropped_block_is_not_read(backend):
    q, k, v, mask = problem(seq=24)
    mask[..., 1] = False
    out = block_sparse_attention(q, k, v, lists_of(mask, 24), backend=backend)
    k[:, :, 8:16], v[:, :, 8:16] = 1e4, -1e4
    torch.testing.assert_close(block_sparse_attention(q, k, v, lists_of(mask, 24), backend=backend), out)


def test_nothing_kept(backend):
    q, k, v, mask = problem()
    out, *grads = results(lambda *x: block_sparse_attention(*x, lists_of(mask & False), backend=backend), [q, k, v],
                          torch.ones_like(q))
    assert not out.any() and not any(g.any() for g in grads)


def test_twice_the_same_bits():
    q, k, v, mask = problem(seq=130, block=16)
    run = lambda: results(lambda *x: block_sparse_attention(*x, lists_of(mask, 130, 16), backend="cpu"), [q, k, v], q)
    assert all(torch.equal(a, b) for a, b in zip(run(), run()))


@pytest.mark.parametrize("shape", [(0, 4, 37, 16), (2, 0, 37, 16)])
def test_empty(shape):
    mask = torch.ones(*shape[:2], 5, 5, dtype=torch.bool)
    q = torch.randn(shape, requires_grad=True)
    out = block_sparse_attention(q, q, q, lists_of(mask))
    assert out.shape == shape
    out.sum().backward()


def test_auto_takes_dense_attention_where_all_is_kept(monkeypatch):
    q, k, v, mask = problem(kv_heads=4)
    calls = []
    for name in ("full", "cpp", "cpu"):
        module = getattr(attention, name)
        monkeypatch.setattr(module, "forward", lambda *args, name=name, real=module.forward: calls.append(name)
                            or real(*args))
    monkeypatch.setattr(attention.cpp, "why_not", lambda q, block_size: "no reason")
    for kept, gate in [(mask | True, None), (mask, None), (mask | True, torch.ones(mask.shape))]:
        block_sparse_attention(q, k, v, lists_of(kept), gate=gate)
    assert calls == ["full", "cpu", "cpu"]


@pytest.mark.parametrize("causal", [False, True])
def test_everything_kept(causal):
    q, k, v, mask = problem(kv_heads=4)
    call = lambda backend: results(lambda
                                   *x: block_sparse_attention(*x, lists_of(mask | True), causal=causal,
                                                              backend=backend), [q, k, v], q)
    for a, b in zip(call("auto"), call("dense")): torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_layouts():
    "Views that are not contiguous: heads after tokens, expanded keys, every second length."
    q, k, v, mask = problem(batch=2, seq=48, dim=32, block=16)
    lists = BlockLists.from_mask(mask, 48, 16)
    lengths = torch.tensor([40, 1, 17, 2], dtype=torch.int32)[::2]
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    expected = block_sparse_attention(q, k, v, lists, lengths=lengths.clone(), backend="dense")
    for backend in ("cpu", "auto"):
        torch.testing.assert_close(block_sparse_attention(*turned, lists, lengths=lengths, backend=backend), expected)
        for of in (lists, BlockLists.from_mask(torch.ones_like(mask), 48, 16)):  # features apart, and overlapping rows
            apart = q.transpose(2, 3).contiguous().transpose(2, 3)
            same = block_sparse_attention(q, k, v, of, backend="dense")
            torch.testing.assert_close(block_sparse_attention(apart, k, v, of, backend=backend), same)
            sliding = torch.randn(2, 4, 79).unfold(2, 32, 1)
            same = block_sparse_attention(sliding, k, v, of, backend="dense")
            torch.testing.assert_close(block_sparse_attention(sliding, k, v, of, backend=backend), same)
        wide = block_sparse_attention(q, k[:, :1].expand_as(k), v[:, :1].expand_as(v), lists, backend=backend)
        torch.testing.assert_close(wide, block_sparse_attention(q, k[:, :1], v[:, :1], lists, backend="dense"))


def test_flex_agrees():
    q, k, v, mask = problem(seq=70, block=16, heads=2, batch=1)
    call = lambda backend: block_sparse_attention(q, k, v, lists_of(mask, 70, 16), causal=True,
                                                  lengths=torch.tensor([60]), backend=backend)
    torch.testing.assert_close(call("flex"), call("dense"))
    check("flex", seq=70, queries=20, dim=32, block=16, causal=True, ragged=True, padded=True, grads=False)
    with pytest.raises(ValueError, match="no gradient on a CPU"):
        block_sparse_attention(q.requires_grad_(), k, v, lists_of(mask, 70, 16), backend="flex")


@pytest.mark.parametrize("backend", ["cpu", "cpp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operator(backend, dtype):
    "PyTorch's own checks: schema, autograd, and a fake implementation that agrees with the real one."
    from dendritic_kernels.attention import _attention
    q, k, v, mask = problem(batch=1, seq=29, queries=23, block=16, dtype=dtype)  # ragged last blocks
    lists = BlockLists.from_mask(mask, 29, 16, 23)
    torch.library.opcheck(_attention, (q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), lists.row_counts,
                                       lists.row_index, lists.col_counts, lists.col_index,
                                       torch.tensor([[1, 28, 5]], dtype=torch.int32),
                                       torch.ones(mask.shape, requires_grad=True), None, None, 16, True, 0.25, backend),
                           atol=1e-2 if dtype == torch.bfloat16 else 1e-5, rtol=1e-2)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_keeps_one_graph(dynamic):
    q, k, v, mask = problem()
    lists, gate, lengths = lists_of(mask), torch.rand(mask.shape), torch.tensor([30, 37])
    call = lambda q, k, v: block_sparse_attention(q * 2, k, v, lists, gate=gate, lengths=lengths) + 1
    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic)
    for a, b in zip(results(compiled, [q, k, v], q), results(call, [q, k, v], q)): torch.testing.assert_close(a, b)


def test_flops_count_what_is_kept():
    q, k, v, mask = problem(seq=32, dim=16, dtype=torch.float32)
    for x in (q, k, v): x.requires_grad_()
    with FlopCounterMode(display=False) as forward:
        out = block_sparse_attention(q, k, v, lists_of(mask, 32), backend="cpu")
    with FlopCounterMode(display=False) as backward: out.sum().backward()
    assert forward.get_total_flops() == 2 * 2 * int(mask.sum()) * 8 * 8 * 16
    assert backward.get_total_flops() == 5 * 2 * int(mask.sum()) * 8 * 8 * 16


ANY = ["cpu", "cpp", "auto", "sdpa", "dense"]


@pytest.mark.parametrize("backend", ANY)
def test_chunks_of_queries_give_the_attention_of_the_sequence(backend):
    "Chunked prefill: the causal attention of all queries at once, also where chunks do not end with blocks."
    q, k, v, mask = problem(seq=80, block=16, dim=32)
    mask[..., 0] = True
    expected = dense_attention(q, k, v, mask[..., :1, :].expand_as(mask), 16, causal=True)  # the same in each row
    for size in (16, 23, 1, 80):
        for first in range(0, 80 - size, size):
            part, end = q[:, :, first:first + size], first + size
            kept = mask[..., :1, :-(-end // 16)].expand(-1, -1, -(-size // 16), -1)
            out = block_sparse_attention(part, k[:, :, :end], v[:, :, :end], BlockLists.from_mask(kept, end, 16, size),
                                         query_offset=first, causal=True, backend=backend)
            torch.testing.assert_close(out, expected[:, :, first:end], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ANY)
def test_a_static_cache_is_read_up_to_the_query(backend):
    "Keys of full length, of which the later ones are not written yet; a text's position may be its own."
    q, k, v, mask = problem(seq=64, queries=1, block=16, dim=32)
    lists = BlockLists.from_mask(mask | True, 64, 16, 1)
    at = torch.tensor([5, 40])
    out = block_sparse_attention(q, k, v, lists, query_offset=at, causal=True, backend=backend)
    for b, end in enumerate((at + 1).tolist()):
        k[b, :, end:] = v[b, :, end:] = 1e4
        one = block_sparse_attention(q[b:b + 1], k[b:b + 1, :, :end], v[b:b + 1, :, :end],
                                     BlockLists.from_mask(mask[:1, :, :, :-(-end // 16)] | True, end, 16, 1),
                                     query_offset=end - 1, causal=True, backend=backend)
        torch.testing.assert_close(out[b:b + 1], one, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(block_sparse_attention(q, k, v, lists, query_offset=at, causal=True, backend=backend),
                               out)


@pytest.mark.parametrize("backend", ANY)
@pytest.mark.parametrize("causal", [False, True])
def test_left_padding_changes_nothing(backend, causal):
    q, k, v, mask = problem(seq=48, block=16, dim=32)
    mask |= True
    out = block_sparse_attention(q, k, v, lists_of(mask, 48, 16), causal=causal, backend=backend)
    for pad in (5, 16, 21):
        blocks = -(-(48 + pad) // 16)
        longer = lambda x: torch.cat([torch.full_like(x[:, :, :pad], torch.nan if backend == "cpp" else 1e4), x], 2)
        lists = lists_of(torch.ones(*mask.shape[:2], blocks, blocks, dtype=torch.bool), 48 + pad, 16)
        padded = block_sparse_attention(longer(q), longer(k), longer(v), lists, starts=torch.tensor([pad, pad]),
                                        causal=causal, backend=backend)
        torch.testing.assert_close(padded[:, :, pad:], out, rtol=1e-4, atol=1e-5)
        assert not padded[:, :, :pad].any()


@pytest.mark.parametrize("backend", ANY)
@pytest.mark.parametrize("sizes", [
    dict(queries=20, causal=True, padded=True), dict(queries=1, causal=True, ragged=True, padded=True),
    dict(queries=33, causal=True, seq=90), dict(queries=37, ragged=True), dict(padded=True, causal=True, density=0.2),
    dict(queries=50, padded=True, kv_heads=1), dict(queries=17, causal=True, density=0.0),
], ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_offsets_and_padding_agree_with_the_reference(backend, sizes, gated):
    if gated and backend in ("sdpa", "dense"): pytest.skip("takes no gate, or is the reference")
    for seed in range(3): check(backend, gated=gated, seed=seed, **dict(seq=70, dim=32, block=16) | sizes)


def test_an_offset_that_does_nothing():
    q, k, v, mask = problem(seq=48, block=16)
    call = lambda **change: block_sparse_attention(q, k, v, lists_of(mask, 48, 16), causal=True, **change)
    assert torch.equal(call(), call(query_offset=0)) and torch.equal(call(), call(starts=torch.tensor([0, 0])))


def test_compile_takes_offsets():
    q, k, v, mask = problem(queries=12)
    lists = BlockLists.from_mask(mask, 37, 8, 12)
    call = lambda q, k, v, at: block_sparse_attention(q, k, v, lists, query_offset=at, causal=True)
    compiled = torch.compile(call, fullgraph=True)
    for at in (3, 4, 25, torch.tensor([3, 9])): torch.testing.assert_close(compiled(q, k, v, at), call(q, k, v, at))


def test_flops_of_a_part():
    "A block that no query sees, and one before the text, are not counted."
    q, k, v, mask = problem(seq=32, queries=8)
    with FlopCounterMode(display=False) as counter:
        block_sparse_attention(q, k, v, BlockLists.from_mask(mask | True, 32, 8, 8), query_offset=16, causal=True,
                               starts=torch.tensor([8, 0]))
    assert counter.get_total_flops() == 2 * 2 * 4 * (2 + 3) * 8 * 8 * 16


good = problem()
lists = lists_of(good[3])


@pytest.mark.parametrize("change, error, message", [
    (dict(q=[1]), TypeError, "q must be a tensor"),
    (dict(q=torch.zeros(2, 4, 37)), ValueError, r"\(batch, heads, seq, head_dim\)"),
    (dict(q=good[0].int()), TypeError, "floating-point"),
    (dict(k=good[1].half()), TypeError, "one dtype"),
    (dict(k=good[1].to("meta")), ValueError, "one device"),
    (dict(q=torch.zeros(2, 4, 37, 0), k=torch.zeros(2, 2, 37, 0), v=torch.zeros(2, 2, 37, 0)), ValueError,
     "head_dim must be at least 1"),
    (dict(k=good[1][:, :, :30]), ValueError, "k and v must be"),
    (dict(v=good[2][..., :8]), ValueError, "k and v must be"),
    (dict(k=torch.zeros(2, 3, 37, 16), v=torch.zeros(2, 3, 37, 16)), ValueError, "multiple of k's 3"),
    (dict(lists=good[3]), TypeError, "BlockLists"),
    (dict(lists=lists_of(good[3][..., :4, :4], 32)), ValueError, "lists are for 32 keys"),
    (dict(lists=lists_of(good[3][:1])), ValueError, r"\(1, 4\) \(batch, heads\)"),
    (dict(lengths=[37, 37]), TypeError, "int32 or int64"),
    (dict(lengths=torch.tensor([37.0, 37.0])), TypeError, "int32 or int64"),
    (dict(lengths=torch.tensor([37])), ValueError, r"lengths must be \(2,\)"),
    (dict(lengths=torch.tensor([37, 38])), ValueError, "0 to 37"),
    (dict(lengths=torch.tensor([-1, 3])), ValueError, "0 to 37"),
    (dict(starts=torch.tensor([0, 38])), ValueError, "starts must be 0 to 37"),
    (dict(starts=0.5), TypeError, "starts must be an int32 or int64 tensor"),
    (dict(query_offset=1), ValueError, "query_offset must be 0 to 0, got 1"),
    (dict(query_offset=torch.tensor([0, 1])), ValueError, "query_offset must be 0 to 0"),
    (dict(query_offset=torch.tensor(0)), ValueError, r"query_offset must be \(2,\), got \(\)"),
    (dict(query_offset=1.0), TypeError, "query_offset must be an int or an int32 or int64 tensor"),
    (dict(q=good[0][:, :, :8]), ValueError, "lists are for 37 queries, q has 8"),
    (dict(q=good[0][:, :, :8], lists=BlockLists.from_mask(good[3][:, :, :1], 37, 8, 8)), ValueError,
     "query_offset must be given for 8 queries and 37 keys"),
    (dict(q=good[0][:, :, :8], lists=BlockLists.from_mask(good[3][:, :, :1], 37, 8, 8), query_offset=30), ValueError,
     "query_offset must be 0 to 29, got 30"),
    (dict(gate=torch.ones(2, 4, 5, 5, dtype=torch.int32)), TypeError, "gate must be"),
    (dict(gate=torch.ones(2, 4, 5, 4)), ValueError, r"\(2, 4, 5, 5\)"),
    (dict(audit=lists), ValueError, "audit needs a gate"),
    (dict(gate=torch.ones(2, 4, 5, 5), audit=lists_of(torch.ones(2, 4, 3, 3, dtype=torch.bool), 37, 16)), ValueError,
     "blocks of 16"),
    (dict(gate=torch.ones(2, 4, 5, 5), backend="sdpa"), ValueError, "takes no gate"),
    (dict(scale=float("nan")), ValueError, "scale must be finite"),
    (dict(backend="fast"), ValueError, "backend must be one of"),
])
def test_refused(change, error, message):
    arguments = dict(q=good[0], k=good[1], v=good[2], lists=lists) | change
    with pytest.raises(error, match=message): block_sparse_attention(**arguments)


@pytest.mark.parametrize("backend", ["cpu", "auto"])
@pytest.mark.parametrize("of", ["q", "k", "v"])
def test_nan_reaches_only_the_queries_that_see_it(backend, of):
    q, k, v, mask = problem(seq=48, batch=1, heads=1, kv_heads=1, dim=32, block=16)
    mask[:] = torch.tensor([[True, False, False], [False, True, True], [False, True, False]])
    dict(q=q, k=k, v=v)[of][..., 2, :] = torch.nan
    out = block_sparse_attention(q, k, v, BlockLists.from_mask(mask, 48, 16), backend=backend)
    assert out[:, :, 2].isnan().all() and not out[:, :, 16:].isnan().any()
    k[:, :, 40:], v[:, :, 40:], q[:, :, 40:] = torch.nan, torch.nan, torch.nan
    short, *grads = results(lambda *x: block_sparse_attention(*x, BlockLists.from_mask(mask, 48, 16),
                                                              lengths=torch.tensor([40]),
                                                              backend=backend), [q, k, v], torch.ones_like(q))
    assert not short[:, :, 16:].isnan().any() and not any(g[:, :, 16:].isnan().any() for g in grads)


@pytest.mark.parametrize("backend", ["cpu", "auto", "dense"])
def test_a_closed_block_may_dwarf_the_others(backend):
    "A gate of zero in a block whose scores would overflow: as if the block were dropped, and finite gradients."
    q, k, v, mask = problem(seq=48, batch=1, heads=1, kv_heads=1, dim=32, block=16)
    k[:, :, :16] = q.mean(2, keepdim=True) * 1000
    gate = torch.ones(mask.shape)
    gate[..., 0] = 0
    closed = lambda q, k, v, gate: block_sparse_attention(q, k, v, BlockLists.from_mask(mask | True, 48, 16), gate=gate,
                                                          backend=backend)
    out, *grads = results(closed, [q, k, v, gate], torch.ones_like(q))
    torch.testing.assert_close(out, block_sparse_attention(q, k, v, BlockLists.from_mask(gate > 0, 48, 16),
                                                           backend="dense").double(), rtol=1e-4, atol=1e-5)
    assert backend == "dense" or all(g.isfinite().all() for g in grads)
