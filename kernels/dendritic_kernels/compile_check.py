"""Compile every kernel variant for a GPU that need not be there, and look at the machine code.

`python -m dendritic_kernels.compile_check 90` compiles for compute capability 9.0, prints registers and spills of each
variant, and exits with 1 if one spills or does without tensor cores.
"""

import argparse
import itertools
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from . import triton_kernels as kernels

POINTERS = dict(q="{dtype}", k="{dtype}", v="{dtype}", out="{dtype}", grad="{dtype}", dq="{dtype}", dk="{dtype}", dv="{dtype}", lse="fp32", delta="fp32", gate="fp32", dgate="fp32",
                counts="i32", index="i32", lengths="i32", mask="u8", row_counts="i32", row_index="i32", col_counts="i32", col_index="i32")


def compile_variant(kernel, capability: int, dtype: str = "fp16", **constants):
    "Compile one kernel for tensors that are aligned to 16 bytes. Arguments that a variant does not use are None."
    absent = {"lengths"} if not constants.get("RAGGED") else set()
    if not constants.get("GATED"): absent |= {"gate", "dgate"}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature, attrs = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants: signature[name] = "constexpr"
        elif name in POINTERS and name in absent: signature[name], constants[name] = "constexpr", None
        elif name in POINTERS: signature[name] = "*" + POINTERS[name].format(dtype=dtype)
        elif name == "scale": signature[name] = "fp32"
        else: signature[name] = "i32"
        if signature[name].startswith("*") or name.startswith("stride"): attrs[(i,)] = [["tt.divisibility", 16]]
    return compile(ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs), target=GPUTarget("cuda", capability, 32), options=dict(num_warps=4, num_stages=3))


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
    "Kernels and their settings as `triton_kernels` launches them, for blocks of 64."
    for dim, causal, ragged, gated in itertools.product((64, 128), (False, True), (False, True), (False, True)):
        settings = dict(DIM=dim, DIM_PADDED=dim, BLOCK=64, BLOCKS=64, CAUSAL=causal, RAGGED=ragged, GATED=gated, AUDIT=False, PRECISION="tf32")
        yield kernels._forward_kernel, settings
        yield kernels._query_grad_kernel, settings
        yield kernels._key_grad_kernel, settings
        if gated: yield kernels._query_grad_kernel, settings | dict(AUDIT=True)


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("capability", type=int, help="compute capability times ten: 80 or 90")
    capability = parser.parse_args(arguments).capability
    bad = 0
    compile_variant(kernels._list_kernel, capability, BLOCKS=64)
    for kernel, settings in variants():
        compiled = compile_variant(kernel, capability, **settings)
        registers, spilled = resources(compiled)
        tensor_cores = re.search(r"wgmma|mma\.sync", compiled.asm["ptx"]) is not None
        good = tensor_cores and not spilled
        bad += not good
        shown = " ".join(f"{name}={settings[name]}" for name in ("DIM", "CAUSAL", "RAGGED", "GATED", "AUDIT"))
        print(f"{'ok ' if good else 'BAD'} {kernel.__name__:22} {shown}: {registers} registers, {spilled} bytes spilled, tensor cores: {tensor_cores}")
    return int(bad > 0)


if __name__ == "__main__": sys.exit(main())
