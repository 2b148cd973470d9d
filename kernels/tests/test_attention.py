"""What holds for block-sparse attention whatever the backend: symmetries, the operator, and refused input."""

import pytest
import torch
from dendritic_kernels import BlockLists, attention, block_sparse_attention
from problems import problem, results
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
        wide = block_sparse_attention(q, k[:, :1].expand_as(k), v[:, :1].expand_as(v), lists, backend=backend)
        torch.testing.assert_close(wide, block_sparse_attention(q, k[:, :1], v[:, :1], lists, backend="dense"))


def test_flex_agrees():
    q, k, v, mask = problem(seq=70, block=16, heads=2, batch=1)
    call = lambda backend: block_sparse_attention(q, k, v, lists_of(mask, 70, 16), causal=True,
                                                  lengths=torch.tensor([60]), backend=backend)
    torch.testing.assert_close(call("flex"), call("dense"))
    with pytest.raises(ValueError, match="no gradient on a CPU"):
        block_sparse_attention(q.requires_grad_(), k, v, lists_of(mask, 70, 16), backend="flex")


def test_operator():
    "PyTorch's own checks: schema, autograd, and a fake implementation that agrees with the real one."
    from dendritic_kernels.attention import _attention
    q, k, v, mask = problem(batch=1, seq=13)  # a ragged last block
    lists = lists_of(mask, 13)
    torch.library.opcheck(_attention, (q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), lists.row_counts,
                                       lists.row_index, lists.col_counts, lists.col_index,
                                       None, torch.ones(mask.shape,
                                                        requires_grad=True), None, None, 8, False, 0.25, "cpu"))


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
    (dict(lists=lists_of(good[3][..., :4, :4], 32)), ValueError, "lists are for 32 tokens"),
    (dict(lists=lists_of(good[3][:1])), ValueError, r"\(1, 4\) \(batch, heads\)"),
    (dict(lengths=[37, 37]), TypeError, "int32 or int64"),
    (dict(lengths=torch.tensor([37.0, 37.0])), TypeError, "int32 or int64"),
    (dict(lengths=torch.tensor([37])), ValueError, r"lengths must be \(2,\)"),
    (dict(lengths=torch.tensor([37, 38])), ValueError, "0 to 37"),
    (dict(lengths=torch.tensor([-1, 3])), ValueError, "0 to 37"),
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
