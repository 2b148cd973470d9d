"""Compile every kernel variant for a GPU that need not be there, and look at the machine code.

`python -m dendritic_kernels.compile_check 90` compiles for compute capability 9.0, prints registers, spills and
shared memory of each variant, and exits with 1 if one asks for more shared memory than there is or, in half
precision, spills or does without tensor cores. In float32, where products are exact and the kernels are for checks
rather than for speed, a spill of 16 bytes passes.
"""

import argparse
import itertools
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from . import triton_kernels as kernels

# bytes that one program may use: CUDA C++ Programming Guide, technical specifications per compute capability
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
DTYPES = dict(fp16=torch.float16, bf16=torch.bfloat16, fp32=torch.float32)
POINTERS = dict(scores="{dtype}", q="{dtype}", k="{dtype}", v="{dtype}", out="{dtype}", grad="{dtype}", dq="{dtype}",
                dk="{dtype}", dv="{dtype}", lse="fp32", delta="fp32", gate="fp32", dgate="fp32",
                counts="i32", index="i32", spans="i32", row_counts="i32", row_index="i32", col_counts="i32",
                col_index="i32")


def compile_variant(kernel, capability: int, dtype: str = "fp16", **constants):
    "Compile one kernel for tensors that are aligned to 16 bytes. Arguments that a variant does not use are None."
    absent = {"spans"} if not constants.get("RAGGED") else set()
    if not constants.get("GATED"): absent |= {"gate", "dgate"}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature, attrs = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants: signature[name] = "constexpr"
        elif name in POINTERS and name in absent: signature[name], constants[name] = "constexpr", None
        elif name in POINTERS: signature[name] = "*" + POINTERS[name].format(dtype=dtype)
        elif name in ("scale", "threshold"): signature[name] = "fp32"
        else: signature[name] = "i32"
        if signature[name].startswith("*") or name.startswith("stride"): attrs[(i,)] = [["tt.divisibility", 16]]
    options = {}
    if "DIM" in constants: options = kernels.launch_options(kernel, constants["DIM"], DTYPES[dtype], capability)
    return compile(ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs),
                   target=GPUTarget("cuda", capability, 32), options=options)


def resources(compiled) -> tuple[int, int]:
    "Registers of a thread and bytes that it spills, from the machine code."
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(compiled.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        text = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    used = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return used["REG"], used["STACK"] + used["LOCAL"]


def variants():
    """Kernels, their settings and data types as `triton_kernels` launches them, for blocks of 64: every combination in
    fp16, the largest kernels in the others."""
    every = itertools.product(("fp16",), (64, 128), (False, True), (False, True), (False, True))
    for dtype, dim, causal, ragged, gated in [*every,
                                              *itertools.product(("bf16", "fp32"), (64, 128), (True,), (True,),
                                                                 (True,))]:
        settings = dict(DIM=dim, DIM_PADDED=dim, BLOCK=64, BLOCKS=64, CAUSAL=causal, RAGGED=ragged, GATED=gated,
                        AUDIT=False, PRECISION="ieee" if dtype == "fp32" else "tf32")
        yield kernels._forward_kernel, settings, dtype
        yield kernels._query_grad_kernel, settings, dtype
        yield kernels._key_grad_kernel, settings, dtype
        if gated: yield kernels._query_grad_kernel, settings | dict(AUDIT=True), dtype


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("capability", type=int, choices=SHARED_MEMORY, help="compute capability times ten")
    capability = parser.parse_args(arguments).capability
    bad = 0
    for dtype in (*DTYPES, "u8"): compile_variant(kernels._list_kernel, capability, dtype, BLOCKS=64)
    for kernel, settings, dtype in variants():
        compiled = compile_variant(kernel, capability, dtype, **settings)
        registers, spilled = resources(compiled)
        tensor_cores = re.search(r"wgmma|mma\.sync|tcgen05\.mma", compiled.asm["ptx"]) is not None
        exact = dtype == "fp32"
        fits = compiled.metadata.shared <= SHARED_MEMORY[capability]
        good = spilled <= (16 if exact else 0) and fits and (tensor_cores or exact)
        bad += not good
        shown = " ".join(f"{name}={settings[name]}" for name in ("DIM", "CAUSAL", "RAGGED", "GATED", "AUDIT"))
        print(f"{'ok ' if good else 'BAD'} {kernel.__name__:18} {dtype} {shown}: {registers} registers, "
              f"{spilled} bytes spilled, {compiled.metadata.shared} bytes shared, tensor cores: {tensor_cores}")
    return int(bad > 0)


if __name__ == "__main__": sys.exit(main())
