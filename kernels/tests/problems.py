"""Random problems, and what every backend is held to."""

import torch
from dendritic_kernels import BlockLists, block_sparse_attention
from dendritic_kernels.reference import dense_attention


def problem(seed=0, batch=2, heads=4, kv_heads=2, seq=37, dim=16, block=8, density=0.5, dtype=torch.float32,
            queries=None):
    "Random q, k, v and block mask; the same for the same arguments. `queries` None: as many as keys."
    generator = torch.Generator().manual_seed(seed)
    random = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    queries = seq if queries is None else queries
    q, k, v = random(batch, heads, queries, dim), random(batch, kv_heads, seq, dim), random(batch, kv_heads, seq, dim)
    rows, cols = -(-queries // block), -(-seq // block)
    return q, k, v, torch.rand(batch, heads, rows, cols, generator=generator) < density


def results(call, tensors, weight):
    "Output of `call` and gradients of its weighted sum, as float64 on the CPU."
    tensors = [t.detach().clone().requires_grad_() for t in tensors]
    out = call(*tensors)
    grads = torch.autograd.grad((out * weight.to(out)).sum(), tensors)
    return [x.detach().double().cpu() for x in (out, *grads)]


def check(backend, *, causal=False, ragged=False, padded=False, gated=False, grads=True, device="cpu", **sizes):
    """Compare a backend with the reference in float64: its error may be twice (output) or three times (gradients)
    that of dense attention in the same precision. `ragged` pads on the right, `padded` on the left; fewer queries than
    keys begin at a random key of each text."""
    q, k, v, mask = problem(**sizes)
    queries, seq, block, seed = q.shape[2], k.shape[2], sizes.get("block", 8), sizes.get("seed", 0)
    generator = torch.Generator().manual_seed(seed + 1)
    random = lambda most: torch.randint(0, most + 1, q.shape[:1], generator=generator)
    lengths = random(seq) if ragged else None
    starts = random(seq) if padded else None
    offset = random(seq - queries) if queries < seq else None
    spans = [torch.zeros_like(random(0)) + otherwise if x is None else x
             for x, otherwise in ((starts, 0), (lengths, seq), (offset, 0))]
    random_gate = torch.rand(mask.shape, generator=generator) * 2
    gate = random_gate.masked_fill(random_gate < 0.2, 0) if gated else None
    audit = (torch.rand(mask.shape, generator=generator) < 0.3) & ~mask if gated else None
    weight = torch.randn(q.shape, generator=generator, dtype=torch.float64)
    tensors = [q, k, v] + [gate] * gated
    to = lambda x: x if x is None else x.to(device)
    lists = BlockLists.from_mask(to(mask), seq, block, queries)
    audited = BlockLists.from_mask(to(audit), seq, block, queries) if gated else None

    sparse = lambda q, k, v, gate=None: block_sparse_attention(q, k, v, lists, lengths=to(lengths), starts=to(starts),
                                                               query_offset=to(offset), causal=causal,
                                                               gate=gate, audit=audited, backend=backend)
    dense = lambda q, k, v, gate=None: dense_attention(q, k, v, mask, block, spans=torch.stack(spans, 1), causal=causal,
                                                       gate=gate, audit=audit)
    exact = results(dense, [x.double() for x in tensors], weight)
    same = results(dense, tensors, weight)
    tensors = [to(x) for x in tensors]
    measured = results(sparse, tensors, weight) if grads else [sparse(*tensors).double().cpu()]
    slope = weight.norm(dim=-1).max() * v.double().norm(dim=-1).max()
    for name, m, e, s in zip(("output", "q", "k", "v", "gate"), measured, exact, same):
        # dense attention can be right by luck on a few numbers
        rounding = 8 * torch.finfo(q.dtype).eps * (1 + e.abs().max())
        # differences of such terms
        if name in "qk":
            rounding = max(rounding, 2 * torch.finfo(q.dtype).eps * slope
                           * torch.maximum(q.abs().max(), k.abs().max()) / q.shape[-1]**0.5)
        # a backward pass makes probabilities anew from scores and their log-sum, whose rounding is relative in them
        if name == "v": rounding = max(rounding, 32 * torch.finfo(q.dtype).eps * (1 + e.abs().max()))
        # a float32 sum over a block, whose terms often cancel
        if name == "gate": rounding = max(rounding, 3e-5 * (1 + e.abs().max()))
        assert (m - e).abs().max() <= (2 if name == "output" else 3) * (s - e).abs().max() + rounding, name
