"""Compiles every kernel for an H100, without one: `python compile_kernels.py`, by a test."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from longspan.attention.kernels import block_sparse_kernels, branch

HALVES = ("q", "k", "v", "out", "grad", "grad_q", "grad_k", "grad_v")


def type_of(name: str) -> Any:
    if name.endswith("strides"):
        return ("i32",) * (2 if name == "lse_strides" else 3)
    if name in HALVES:
        return "*bf16"
    if name in ("q_ids", "k_ids", "offsets"):
        return "*i64"
    if name in ("blocks", "queries", "keys", "slots"):
        return "*i32"
    if name in ("scale", "natural_scale"):
        return "fp32"
    floats = ("lse", "limit", "delta", "partial", "partial_k", "partial_v")
    return "*fp32" if name in floats else "i32"


def compile_kernel(
    function: Any, constants: dict[str, Any], described: dict[str, str], stages: int
) -> None:
    signature = {
        name: "constexpr" if name in constants else described.get(name) or type_of(name)
        for name in function.arg_names
    }
    places = {(function.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(function, signature, places, {})
    options = {"num_warps": 4, "num_stages": stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert "wgmma" in compiled.asm["ptx"]


def compile_branch(kernel: str, queries: int, keys: int, **changes: Any) -> None:
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
    rows, names = (queries, ("q", "grad")) if kernel == "key_grad" else (keys, ("k", "v"))
    described = dict.fromkeys(names, f"tensordesc<bf16[1,{rows},1,1,64]>")
    compile_kernel(getattr(branch, kernel), constants, described, 3)


def compile_listed() -> None:
    sizes = {"HEAD_DIM": 64, "TILE_M": 64, "TILE_N": 64}
    tile = "tensordesc<bf16[64,64]>"
    for first, last in ((True, True), (True, False), (False, True)):
        constants = {"FIRST": first, "LAST": last, **sizes}
        described = dict.fromkeys(("q", "grad", "ds"), tile)
        compile_kernel(
            block_sparse_kernels.key_grad, constants, {**described, "offsets": "*i32"}, 2
        )
    compile_kernel(block_sparse_kernels.query_grad, sizes, dict.fromkeys(("k", "ds"), tile), 3)


if __name__ == "__main__":
    for kernel, queries, keys in (
        ("forward", 64, 64),
        ("query_grad", 64, 32),
        ("key_grad", 32, 64),
    ):
        compile_branch(kernel, queries, keys)
        compile_branch(kernel, queries, keys, CROSS=True, FIRST=True, LAST=False, EVEN=True)
        compile_branch(kernel, queries, keys, CROSS=True, CAUSAL=False, IDS=True)
        compile_branch(kernel, queries, keys, RATIOS=(), LISTED=True, FIRST=True, IDS=True)
    compile_listed()
