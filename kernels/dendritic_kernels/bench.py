"""How long block-sparse attention takes beside dense attention, measured in turn in one process.

`python -m dendritic_kernels.bench` writes a JSON file and a plot. Every figure is a ratio to PyTorch's fused
scaled_dot_product_attention over the whole matrix, the fastest of its kernels: the median over rounds, with quartiles.
In a round each contender runs once, in an order that turns from round to round; dense attention runs twice, so that
its ratio to itself, the null, says how far a ratio strays.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from . import cpp, flex
from .attention import block_sparse_attention
from .lists import BlockLists


def in_turn(contenders: dict[str, Callable[[], object]], rounds: int, device: str) -> dict[str, list[float]]:
    "Seconds of each contender in each round, after two calls to warm up."
    def seconds(call) -> float:
        if device == "cuda": torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if device == "cuda": torch.cuda.synchronize()
        return time.perf_counter() - start

    for call in contenders.values(): call(), call()
    times, names = {name: [] for name in contenders}, list(contenders)
    for i in range(rounds):
        turned = names[i % len(names):] + names[:i % len(names)]
        for name in turned: times[name].append(seconds(contenders[name]))
    return times


def random_mask(batch: int, heads: int, blocks: int, sparsity: float, seed: int = 0) -> Tensor:
    "(batch, heads, blocks, blocks) bool: exactly this share dropped, at random, so rows keep different numbers."
    scores = torch.rand(batch * heads * blocks * blocks, generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(scores.shape, dtype=torch.bool)
    mask[scores.argsort()[:round(sparsity * len(scores))]] = False
    return mask.view(batch, heads, blocks, blocks)


def dense_kernels(device: str) -> dict[str, list[SDPBackend]]:
    "PyTorch's dense attention: on a GPU each fused kernel by itself."
    if device == "cpu": return {"sdpa": [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]}
    return {"sdpa_flash": [SDPBackend.FLASH_ATTENTION], "sdpa_cudnn": [SDPBackend.CUDNN_ATTENTION]}


def backends(device: str) -> list[str]:
    if device == "cuda": return ["triton", "flex"]
    return ["cpu"] + (["cpp"] if cpp._library()[1] is None else []) + ["flex"]


def contenders_of(
    q: Tensor, k: Tensor, v: Tensor,  # (batch, heads, length, head_dim)
    mask: Tensor,  # (batch, heads, blocks, blocks) bool
    block_size: int,
    backward: Callable[[Tensor], object],  # what is done with the output
) -> dict[tuple[str, str], Callable[[], object]]:  # (what is measured, backend) -> a call
    "Dense attention twice, of which one is the null, and each backend with its lists at hand and from the mask on."
    device, length = q.device.type, q.shape[2]
    lists = BlockLists.from_mask(mask, length, block_size)
    build = lambda: BlockLists.from_mask(mask, length, block_size)

    def dense(kernels):
        with sdpa_kernel(kernels): return backward(scaled_dot_product_attention(q, k, v))

    found = {}
    for name, kernels in dense_kernels(device).items():
        found["dense", name] = found["null", name] = partial(dense, kernels)
    for backend in backends(device):
        if backend == "flex" and q.requires_grad and device == "cpu": continue  # it has no gradient there
        sparse = lambda lists, backend=backend: backward(block_sparse_attention(q, k, v, lists, backend=backend))
        found["operator", backend] = partial(sparse, lists)
        if backend == "flex":
            made, scale = flex.block_mask(lists), q.shape[-1] ** -0.5
            found["operator", backend] = lambda: backward(flex.flex_attention(q, k, v, made, scale))
        found["mask_to_output", backend] = lambda sparse=sparse: sparse(build())
    return found


def failures(contenders: dict) -> list[dict]:
    "Take out the contenders that cannot run here, and name them."
    failed = []
    for key, call in list(contenders.items()):
        try: call()
        except Exception as e:
            what = f"{type(e).__name__}: {str(e).splitlines()[0][:200]}"
            failed.append({"measured": key[0], "backend": key[1], "failed": what})
            del contenders[key]
    return failed


def measure(device: str, dtype: torch.dtype, batch: int, heads: int, length: int, head_dim: int, block_size: int,
            sparsity: float, training: bool, rounds: int) -> list[dict]:
    """One length and sparsity: each backend with its lists at hand, and from the mask on.

    Ratios are to the fastest dense kernel, one a round. The row `null` is that kernel against itself.
    """
    generator, shape = torch.Generator().manual_seed(0), (batch, heads, length, head_dim)
    q, k, v, grad = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(4))
    for x in (q, k, v): x.requires_grad_(training)
    mask = random_mask(batch, heads, -(-length // block_size), sparsity).to(device)
    backward = lambda out: torch.autograd.grad(out, (q, k, v), grad) if training else out
    with torch.set_grad_enabled(training):
        contenders = contenders_of(q, k, v, mask, block_size, backward)
        rows = failures(contenders)
        times = in_turn(contenders, rounds, device)
    medians = {key: statistics.median(seconds) for key, seconds in times.items()}
    fastest = min((key for key in times if key[0] == "dense"), key=medians.get)
    for (what, backend), seconds in times.items():
        if what == "null" and backend != fastest[1]: continue
        ratios = [a / b for a, b in zip(seconds, times[fastest])]
        low, middle, high = statistics.quantiles(ratios, n=4)
        rows.append({
            "measured": what, "backend": backend, "ratio": middle, "ratio_low": low, "ratio_high": high,
            "ratios": ratios, "seconds": medians[what, backend], "dense_seconds": medians[fastest],
            "dense_kernel": fastest[1]})
    where = {"device": device, "dtype": str(dtype).removeprefix("torch."), "batch": batch, "heads": heads,
             "length": length, "head_dim": head_dim, "block_size": block_size, "sparsity": sparsity,
             "direction": "training" if training else "forward", "rounds": rounds}
    return [where | row for row in rows]


def machine(device: str) -> dict:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return {"processor": next(names, platform.processor()), "threads": torch.get_num_threads(),
            "instruction_set": torch.backends.cpu.get_cpu_capability(),
            "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
            "torch": torch.__version__, "python": platform.python_version(), "system": platform.system()}


def plot(results: list[dict], path: Path):
    "Ratio against sparsity, a panel for each length and pass, with the line that skipping alone would give."
    import matplotlib.pyplot as plt
    panels = sorted({(r["direction"], r["length"]) for r in results})
    colors = {backend: f"C{i}" for i, backend in enumerate(sorted({r["backend"] for r in results}))}
    figure, axes = plt.subplots(1, len(panels), figsize=(4 * len(panels), 3.6), sharey=True, squeeze=False)
    for axis, (which, length) in zip(axes[0], panels):
        here = [r for r in results if (r["direction"], r["length"]) == (which, length) and "ratio" in r
                and r["measured"] == "operator"]
        for backend in sorted({r["backend"] for r in here}):
            points = sorted((r["sparsity"], r["ratio"], r["ratio_low"], r["ratio_high"])
                            for r in here if r["backend"] == backend)
            x, y, low, high = zip(*points)
            axis.plot([100 * s for s in x], y, "o-", color=colors[backend], label=backend)
            axis.fill_between([100 * s for s in x], low, high, color=colors[backend], alpha=0.2)
        shown = sorted({100 * r["sparsity"] for r in here})
        axis.plot(shown, [1 - s / 100 for s in shown], "--", color="grey", label="1 - sparsity")
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set(title=f"{which}, {length} tokens", xlabel="blocks dropped, %", yscale="log")
    axes[0][0].set_ylabel("time / dense attention's")
    axes[0][0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def arguments_of(arguments: list[str] | None) -> argparse.Namespace:
    "The command line, checked."
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    gpu = torch.cuda.is_available()
    long = [1024, 2048, 4096, 16384]
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if gpu else "cpu")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="bfloat16" if gpu else "float32")
    parser.add_argument("--lengths", type=int, nargs="+", default=long if gpu else long[:3])
    parser.add_argument("--training-lengths", type=int, nargs="*", default=long if gpu else [2048])
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.0, 0.25, 0.5, 0.75, 0.9])
    parser.add_argument("--batch", type=int, default=16 if gpu else 1)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for attention.json and attention.png")
    args = parser.parse_args(arguments)
    if args.rounds < 3: parser.error("--rounds must be at least 3, for quartiles")
    if not all(0 <= s < 1 for s in args.sparsity): parser.error("--sparsity must be at least 0 and below 1")
    if args.device == "cuda" and not gpu: parser.error("no CUDA device is available")
    return args


def line(row: dict) -> str:
    name = "dense against dense" if row["measured"] == "null" else row["backend"]
    if "ratio" not in row: return f"{name} failed"
    return f"{name} {row['ratio']:.2f} [{row['ratio_low']:.2f}, {row['ratio_high']:.2f}]"


def main(arguments=None):
    args = arguments_of(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    dtype, results = getattr(torch, args.dtype), []
    plan = [(n, s, training) for training, lengths in ((False, args.lengths), (True, args.training_lengths))
            for n in lengths for s in args.sparsity]
    for length, sparsity, training in plan:
        rows = measure(args.device, dtype, args.batch, args.heads, length, args.head_dim, args.block_size, sparsity,
                       training, args.rounds)
        results += rows
        shown = ", ".join(line(row) for row in rows if row["measured"] in ("operator", "null"))
        print(f"{'training' if training else 'forward'} {length} tokens, {sparsity:.0%} dropped: {shown}", flush=True)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    record = {"machine": machine(args.device), "time": now, "results": results}
    (args.out / "attention.json").write_text(json.dumps(record, indent=1) + "\n")
    plot(results, args.out / "attention.png")
    print(f"wrote {args.out / 'attention.json'} and {args.out / 'attention.png'}")


if __name__ == "__main__": main()
