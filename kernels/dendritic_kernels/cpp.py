"""Block-sparse attention on a CPU with a small C++ file, compiled for this processor on first use.

The library is kept in the user's cache directory under a name that holds a digest of the source and of how it was
compiled, so a change of either builds another, and two processes that build at once do not disturb each other.
`python -m dendritic_kernels` builds it ahead of time.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("attention.cpp")
PROCESS = os.getpid()  # whose OpenMP threads PyTorch uses; a forked process has not got them
PROCESSORS = {"AVX512": (16, ["-mavx512f", "-mfma"]), "AVX2": (8, ["-mavx2", "-mfma"]), "DEFAULT": (4, [])}


def _multiplies_half() -> bool:
    "Whether this processor has products of bfloat16, added to float32, in vectors of 16."
    return _lanes() == 16 and torch.cpu._is_avx512_bf16_supported()


def _lanes() -> int: return PROCESSORS.get(torch.backends.cpu.get_cpu_capability(), PROCESSORS["DEFAULT"])[0]


def why_not(q: Tensor, block_size: int) -> str | None:
    "Why this backend cannot take these tensors, or None."
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"it takes float32, float16 and bfloat16, not {q.dtype}"
    if block_size % _lanes():
        return f"the block size must be a multiple of {_lanes()} on this processor, got {block_size}"
    return _library()[1]


@lru_cache(1)
def _library() -> tuple[ctypes.CDLL | None, str | None]:
    "The compiled library, or None and the reason."
    capability = torch.backends.cpu.get_cpu_capability()
    lanes, flags = PROCESSORS.get(capability, PROCESSORS["DEFAULT"])
    if _multiplies_half(): flags = [*flags, "-mavx512bf16"]
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None: return None, "no C++ compiler was found (c++, g++, clang++ or the CXX variable)"
    command = [compiler, "-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=fast", "-shared", "-fPIC", "-pthread",
               f"-DLANES={lanes}", *flags]
    digest = hashlib.sha256(SOURCE.read_bytes() + " ".join(command).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dendritic_kernels"
    path = folder / f"attention-{digest}.so"
    try:
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as building:
                built = Path(building, "attention.so")
                subprocess.run([*command, str(SOURCE), "-o", str(built)], check=True, capture_output=True, text=True)
                built.replace(path)
        library = ctypes.CDLL(str(path))
    except subprocess.CalledProcessError as e:
        return None, f"{compiler} failed: {(e.stderr.strip().splitlines() or ['no message'])[0]}"
    except OSError as e: return None, f"the library could not be built or loaded: {e}"
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    call = [pointer] * 5 + [number] * 7 + [ctypes.c_float, ctypes.c_int, ctypes.c_int]
    library.block_sparse_forward.argtypes = call + [pointer] * 5 + [ctypes.c_int]
    library.block_sparse_backward.argtypes = call + [pointer] * 7 + [number] + [pointer] * 4
    library.use_openmp.argtypes = [pointer]
    if os.getpid() == PROCESS: library.use_openmp(_openmp())
    return library, None


def _openmp() -> int | None:
    """Address of `GOMP_parallel` in the OpenMP runtime that computes for PyTorch; None where it is not found.

    Other libraries may have loaded runtimes of their own, so it is the one that lies with PyTorch, or the only one.
    """
    try: lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError: return None
    mapped = {Path(line.split(maxsplit=5)[5]) for line in lines if ".so" in line}
    runtimes = [path for path in mapped if path.name.startswith(("libgomp", "libomp", "libiomp"))]
    package = Path(torch.__file__).resolve().parent
    own = [path for path in runtimes if package in path.parents or package.with_name("torch.libs") in path.parents]
    if len(own or runtimes) != 1: return None
    try: return ctypes.cast(ctypes.CDLL(str((own or runtimes)[0])).GOMP_parallel, ctypes.c_void_p).value
    except (OSError, AttributeError): return None


def _floats(*tensors: Tensor | None) -> list[Tensor | None]:
    "Contiguous, in float32, in which everything is computed."
    return [x if x is None else x.float().contiguous() for x in tensors]


def _address(x: Tensor | None) -> int | None: return None if x is None else x.data_ptr()


def _call(function, q: Tensor, k: Tensor, v: Tensor, spans: Tensor | None, gate: Tensor | None, block_size: int,
          causal: bool, scale: float, *others: Tensor | ctypes.Array | int | None):
    "Call the library."
    sizes = q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], block_size
    others = [_address(x) if isinstance(x, Tensor) else x for x in others]
    if function(*map(_address, (q, k, v, spans, gate)), *sizes, scale, causal, torch.get_num_threads(), *others):
        raise MemoryError("not enough memory for block-sparse attention")


def forward(q: Tensor, k: Tensor, v: Tensor, row_counts: Tensor, row_index: Tensor, spans: Tensor | None,
            gate: Tensor | None,
            block_size: int, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    "Output like q, and the logarithm of the weights' sum (batch, heads, seq), +inf where nothing is kept."
    dtype, half = q.dtype, q.dtype == torch.bfloat16 and q.shape[-1] % 2 == 0 and _multiplies_half()
    if half: k, v = k.contiguous(), v.contiguous()
    else: q, (k, v) = q.float(), _floats(k, v)
    odd = half and (q.data_ptr() % 4 or any(stride % 2 for stride in q.stride()[:3]))  # pairs are read as one number
    if q.stride(-1) != 1 or odd: q = q.clone(memory_format=torch.contiguous_format)
    out, lse, (gate,) = torch.empty_like(q), torch.empty(q.shape[:3]), _floats(gate)
    if out.stride(-1) != 1: out = torch.empty(q.shape, dtype=q.dtype)
    strides = (ctypes.c_int64 * 6)(*q.stride()[:3], *out.stride()[:3])
    _call(_library()[0].block_sparse_forward, q, k, v, spans, gate, block_size, causal, scale, out, lse, row_counts,
          row_index, strides, int(half))
    return out.to(dtype), lse


def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, col_counts: Tensor,
             col_index: Tensor, spans: Tensor | None, gate: Tensor | None, audit_counts: Tensor | None,
             audit_index: Tensor | None, block_size: int, causal: bool,
             scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    "Gradients of q, k, v and, where there is a gate, of it."
    dtypes = q.dtype, None if gate is None else gate.dtype
    grad, out, q, k, v, gate = _floats(grad, out, q, k, v, gate)
    heads, threads = q.shape[0] * q.shape[1], torch.get_num_threads()
    # with few heads a thread takes a part of one's key blocks, and the gradients of queries are summed
    parts = 1 if threads == 1 or heads >= 2 * threads else min(-(-4 * threads // heads), col_counts.shape[-1])
    dq = q.new_empty(parts, *q.shape)
    dk, dv = (k.new_empty(q.shape[0], q.shape[1], *k.shape[2:]) for _ in range(2))
    dgate = None if gate is None else torch.zeros_like(gate)
    _call(_library()[0].block_sparse_backward, q, k, v, spans, gate, block_size, causal, scale, grad, out, lse, dq, dk,
          dv, dgate, parts, col_counts, col_index, audit_counts, audit_index)
    if q.shape[1] != k.shape[1]: dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))
    dq = dq[0] if parts == 1 else dq.sum(0)
    return *(x.to(dtypes[0]) for x in (dq, dk, dv)), None if gate is None else dgate.to(dtypes[1])
