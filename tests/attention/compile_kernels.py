"""Compiles every kernel for an H100, without one: `python compile_kernels.py`, by a test."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from longspan.attention import kernels

DESCRIBED = {"forward": ("k", "v"), "query_grad": ("k", "v"), "key_grad": ("q", "grad")}
HALVES = ("q", "k", "v", "out", "grad", "grad_q", "grad_k", "grad_v")


def type_of(name: str, kernel: str, rows: int, constants: dict[str, Any]) -> Any:
    if name in constants:
        return "constexpr"
    if name in DESCRIBED[kernel]:
        return f"tensordesc<bf16[1,{rows},1,1,64]>"
    if name.endswith("strides"):
        return ("i32",) * (2 if name == "lse_strides" else 3)
    if name in HALVES:
        return "*bf16"
    if name in ("q_ids", "k_ids", "offsets"):
        return "*i64"
    if name == "blocks":
        return "*i32"
    if name in ("scale", "natural_scale"):
        return "fp32"
    floats = ("lse", "limit", "delta", "partial", "partial_k", "partial_v")
    return "*fp32" if name in floats else "i32"


def compile_kernel(kernel: str, queries: int, keys: int, **changes: Any) -> None:
    constants = {
        "RATIOS": (2, 4),
        "CROSS": False,
        "CAUSAL": True,
        "FIRST": False,
        "LAST": True,
        "EVEN": False,
        "LISTED": False,
        "IDS": False,
        "HEAD_DIM": 64,
        "DIMS": 64,
        "TILE_M": queries,
        "TILE_N": keys,
        **changes,
    }
    function = getattr(kernels, kernel)
    rows = queries if kernel == "key_grad" else keys
    signature = {name: type_of(name, kernel, rows, constants) for name in function.arg_names}
    places = {(function.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(function, signature, places, {})
    options = {"num_warps": 4, "num_stages": 3}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert "wgmma" in compiled.asm["ptx"]


if __name__ == "__main__":
    for kernel, queries, keys in (
        ("forward", 64, 64),
        ("query_grad", 64, 32),
        ("key_grad", 32, 64),
    ):
        compile_kernel(kernel, queries, keys)
        compile_kernel(kernel, queries, keys, CROSS=True, FIRST=True, LAST=False, EVEN=True)
        compile_kernel(kernel, queries, keys, CROSS=True, CAUSAL=False, IDS=True)
        compile_kernel(kernel, queries, keys, RATIOS=(), LISTED=True, FIRST=True, IDS=True)
