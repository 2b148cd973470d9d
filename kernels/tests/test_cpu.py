"""The CPU backend against the dense reference in float64, over random shapes, masks and settings."""

import pytest
import torch
from dendritic_kernels import BlockLists, block_sparse_attention, cpp, cpu
from dendritic_kernels.reference import dense_attention
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import check, problem, results


@settings(max_examples=60, deadline=None, print_blob=True)
@given(seed=st.integers(0, 10**6), batch=st.integers(1, 3), kv_heads=st.integers(1, 2), groups=st.integers(1, 3),
       seq=st.integers(1, 70), dim=st.sampled_from([1, 16, 33]),
       block=st.sampled_from([1, 8, 16]), density=st.sampled_from([0, 0.1, 0.5, 0.9, 1]),
       causal=st.booleans(), ragged=st.booleans(), padded=st.booleans(), part=st.sampled_from([0, 0.1, 0.6, 1]),
       gated=st.booleans(), chunk=st.sampled_from([1, 2**10, 2**19]))
def test_agrees_with_the_reference(groups, kv_heads, chunk, part, **sizes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "CHUNK", chunk)
        check("cpu", heads=kv_heads * groups, kv_heads=kv_heads, queries=max(1, round(part * sizes["seq"])), **sizes)


needs_compiler = pytest.mark.skipif(cpp._library()[1] is not None, reason=f"C++ backend: {cpp._library()[1]}")


@needs_compiler
@settings(max_examples=60, deadline=None, print_blob=True)
@given(seed=st.integers(0, 10**6), batch=st.integers(1, 3), kv_heads=st.integers(1, 2), groups=st.integers(1, 3),
       seq=st.integers(1, 150), dim=st.sampled_from([1, 16, 33, 64, 128]),
       block=st.sampled_from([16, 48, 64]), density=st.sampled_from([0, 0.1, 0.5, 0.9, 1]),
       causal=st.booleans(), ragged=st.booleans(), padded=st.booleans(), part=st.sampled_from([0, 0.1, 0.6, 1]),
       gated=st.booleans(), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_cpp_agrees_with_the_reference(groups, kv_heads, part, gated, dtype, **sizes):
    grads = dtype == torch.float32 or not gated  # a gate's gradient has the error of an output that was rounded
    check("cpp", heads=kv_heads * groups, kv_heads=kv_heads, queries=max(1, round(part * sizes["seq"])), gated=gated,
          dtype=dtype, grads=grads, **sizes)


@needs_compiler
@pytest.mark.parametrize("gated", [False, True])
def test_cpp_is_exact(gated):
    "Output and gradients within 1e-5 of the reference's, at a head's usual sizes."
    q, k, v, mask = problem(seq=500, queries=300, heads=4, dim=64, block=64)
    gate = [torch.rand(mask.shape) + 0.1] * gated
    settings = dict(causal=True, query_offset=torch.tensor([100, 200]), starts=torch.tensor([0, 30]),
                    lengths=torch.tensor([450, 500]))
    lists, weight = BlockLists.from_mask(mask, 500, 64, 300), torch.randn_like(q)
    call = lambda backend, *x: results(lambda q, k, v, gate=None: block_sparse_attention(
        q, k, v, lists, gate=gate, backend=backend, **settings), x, weight)
    for found, expected in zip(call("cpp", q, k, v, *gate),
                               call("dense", *(x.double() for x in (q, k, v, *gate)))):
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("backend", ["cpu", pytest.param("cpp", marks=needs_compiler)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(backend, dtype):
    q, k, v, mask = problem(block=16, dtype=dtype)
    lists, gate, weight = BlockLists.from_mask(mask, 37, 16), torch.rand(mask.shape), torch.ones_like(q)
    call = lambda: results(lambda q, k, v, gate: block_sparse_attention(
        q, k, v, lists, lengths=torch.tensor([37, 20]), gate=gate, backend=backend), (q, k, v, gate), weight)
    expected = call()
    with torch.autocast("cpu", torch.bfloat16): found = call()
    for a, b in zip(found, expected): assert torch.equal(a, b)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [16, 33, 64, 70])
@pytest.mark.parametrize("gated", [False, True])
def test_cpp_one_query(dim, gated, dtype):
    "As in decoding; also where nothing is kept, and where all that is kept is padding."
    for seed, density in enumerate((0.0, 0.2, 0.5, 1.0)):
        sizes = dict(seed=seed, queries=1, seq=150, block=32, dim=dim, gated=gated, density=density, dtype=dtype)
        check("cpp", causal=True, ragged=True, padded=True, **sizes)
        check("cpp", **sizes)


@needs_compiler
@pytest.mark.parametrize("start", [1, 5, 16, 21])
def test_cpp_bfloat16_sees_no_padding(start):
    "NaN before an odd first key and after an odd last one, which share a pair of keys with what is seen."
    q, k, v, mask = problem(seq=75, block=16, dim=32, dtype=torch.bfloat16)
    lists, seen = BlockLists.from_mask(mask | True, 75, 16), slice(start, start + 41)
    expected = dense_attention(*(x[:, :, seen].double() for x in (q, k, v)), (mask | True)[..., :3, :3], 16)
    for x in (q, k, v): x[:, :, :start] = x[:, :, seen.stop:] = torch.nan
    call = lambda backend: block_sparse_attention(q, k, v, lists, backend=backend, starts=torch.tensor([start] * 2),
                                                  lengths=torch.tensor([seen.stop] * 2))
    torch.testing.assert_close(call("cpp")[:, :, seen].double(), expected, rtol=0.02, atol=0.02)
    assert not call("cpp")[:, :, :start].any() and not call("cpp")[:, :, seen.stop:].any()


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_cpp_any_scale(scale, dtype):
    q, k, v, mask = problem(seq=64, block=16, dtype=dtype)
    lists = BlockLists.from_mask(mask | True, 64, 16)
    call = lambda backend: block_sparse_attention(q, k, v, lists, causal=True, scale=scale, backend=backend)
    torch.testing.assert_close(call("cpp").float(), call("dense").float(), rtol=0.02, atol=0.02)


@needs_compiler
def test_cpp_layouts():
    "Views that are not contiguous, also of the gradient."
    q, k, v, mask = problem(seq=70, queries=40, block=16, dim=24)
    lists = BlockLists.from_mask(mask, 70, 16, 40)
    call = lambda *x: block_sparse_attention(*x, lists, query_offset=30, causal=True, backend="cpp")
    expected = results(call, [q, k, v], q)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    out = call(*turned)
    grads = torch.autograd.grad(out.transpose(1, 2), turned, q.transpose(1, 2).contiguous())
    for a, b in zip((out, *grads), expected): torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    assert out.stride() == turned[0].stride()
    one, = torch.autograd.grad(call(*turned).sum(), turned[:1])  # an expanded gradient
    torch.testing.assert_close(one.double(), results(call, [q, k, v], torch.ones_like(q))[1], rtol=1e-5, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpp_large_scores(dtype):
    "Scores whose exponential would overflow, and NaN where it belongs."
    q, k, v, mask = problem(seq=64, block=16, dtype=dtype)
    lists = BlockLists.from_mask(mask | True, 64, 16)
    call = lambda backend: block_sparse_attention(q * 300, k * 300, v, lists, backend=backend)
    if dtype == torch.float32: torch.testing.assert_close(call("cpp"), call("dense"))
    assert call("cpp").isfinite().all()
    k[0, 0, 0, 0] = torch.nan
    assert call("cpp")[0, :2].isnan().all() and not call("cpp")[1].isnan().any()


def test_cpp_says_why_not(monkeypatch):
    q, k, v, mask = problem(block=5)
    with pytest.warns(UserWarning, match="multiple of"):
        out = block_sparse_attention(q, k, v, BlockLists.from_mask(mask, 37, 5), backend="cpp")
    torch.testing.assert_close(out, block_sparse_attention(q, k, v, BlockLists.from_mask(mask, 37, 5), backend="cpu"))
    monkeypatch.setattr(cpp, "_library", lambda: (None, "no C++ compiler was found"))
    lists = BlockLists.from_mask(problem(block=16)[3], 37, 16)
    with pytest.warns(UserWarning, match="no C\\+\\+ compiler"): block_sparse_attention(q, k, v, lists, backend="cpp")


def test_no_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/c++")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")
    library, reason = cpp._library.__wrapped__()
    assert library is None and "could not be built" in reason


def test_a_compiler_that_fails(monkeypatch, tmp_path):
    failing = tmp_path / "c++"
    failing.write_text("#!/bin/sh\necho 'no such standard' >&2\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setenv("CXX", str(failing))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cpp._library.__wrapped__() == (None, f"{failing} failed: no such standard")
    assert not list((tmp_path / "dendritic_kernels").iterdir())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", ["cpu", "cpp"])
def test_half_precision(backend, dtype):
    if backend == "cpp" and cpp._library()[1]: pytest.skip(cpp._library()[1])
    check(backend, dtype=dtype, causal=True, ragged=True, block=16, gated=True)


@pytest.mark.parametrize("gated", [False, True])
def test_gradcheck(gated):
    q, k, v, mask = problem(batch=1, heads=2, kv_heads=1, seq=11, dim=3, block=4, dtype=torch.float64)
    lists = BlockLists.from_mask(mask, 11, 4)
    gate = [torch.rand(mask.shape, dtype=torch.float64).add(0.5)] if gated else []
    call = lambda q, k, v, gate=None: block_sparse_attention(q, k, v, lists, gate=gate, causal=True, backend="cpu")
    assert torch.autograd.gradcheck(call, [x.requires_grad_() for x in (q, k, v, *gate)])


@needs_compiler
@pytest.mark.parametrize("first", [0, 1])
def test_half_precision_in_odd_places(first):
    "Rows of queries that do not begin with a whole pair of numbers, or that lie an odd number of them apart."
    q, k, v, mask = problem(seq=40, block=16, dim=32, dtype=torch.bfloat16)
    lists = BlockLists.from_mask(mask, 40, 16)
    spread = torch.zeros(*q.shape[:3], 35, dtype=q.dtype)[..., first:first + 32].copy_(q)
    call = lambda q: block_sparse_attention(q, k, v, lists, backend="cpp")
    assert torch.equal(call(spread), call(q))


@pytest.mark.parametrize("backend", ["cpu", "cpp"])
@pytest.mark.parametrize("size", [1.0, 30.0])
def test_audit_says_what_keeping_a_block_would_add(backend, size):
    "Also where what is left out outweighs what is kept: the derivative at a closed gate is e^100 there."
    if backend == "cpp" and cpp._library()[1]: pytest.skip(cpp._library()[1])
    q, k, v, mask = problem(batch=1, heads=1, kv_heads=1, seq=48, block=16)
    mask[:] = torch.tensor([[True, False, False], [True, True, False], [False, True, True]])
    lists = lambda kept: BlockLists.from_mask(kept, 48, 16)
    gate = mask.float().requires_grad_()
    loss = lambda kept, **about: block_sparse_attention(q * size, k, v, lists(kept), backend=backend, **about).sum()
    slope, = torch.autograd.grad(loss(mask, gate=gate, audit=lists(~mask)), gate)
    for row, column in (~mask[0, 0]).nonzero().tolist():
        more = mask.clone()
        more[0, 0, row, column] = True
        torch.testing.assert_close(slope[0, 0, row, column], loss(more) - loss(mask), rtol=1e-4, atol=1e-4)
