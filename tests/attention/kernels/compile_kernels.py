"""Compiles the kernels for an H100, without one: `python compile_kernels.py [--all]`.

By default each kernel once, each with other constants; with --all every kernel with all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from longspan.attention.kernels import (
    block_sparse_kernels,
    branch,
    decode,
    hopper,
    hopper_backward,
    hopper_forward,
    rotary,
    rows,
    window_kernels,
)
from longspan.attention.kernels.gluon_parts import layout_of

HALF = ("q", "k", "v", "out", "do", "dq", "dk", "dv")
FLOAT = ("lse", "safe_lse", "delta", "partial", "partial_k", "partial_v")
TILES = {"forward": (64, 64), "backward_dq": (64, 32), "backward_dkdv": (32, 64)}
CHANGES: list[dict[str, Any]] = [
    {"SKIP_INNER": True, "CAUSAL": False, "HAS_IDS": True, "HAS_DOCUMENTS": True},
    {"RATIOS": (), "BLOCK_SPARSE": True, "FIRST": True, "HAS_IDS": True},
    {"HAS_DOCUMENTS": True},
    {},
    {"SKIP_INNER": True, "FIRST": True, "LAST": False, "EVEN": True},
]


def type_of(name: str) -> Any:
    if name.endswith("strides"):
        return ("i32",) * 3
    if name in HALF:
        return "*bf16"
    if name in ("q_ids", "k_ids", "offsets"):
        return "*i64"
    if name in ("indices", "queries", "keys", "slots", "work"):
        return "*i32"
    if name in ("scale_log2", "softmax_scale"):
        return "fp32"
    return "*fp32" if name in FLOAT else "i32"


def compile_kernel(
    function: Any,
    constants: dict[str, Any],
    descriptors: dict[str, Any],
    stages: int,
    source_type: type[ASTSource] = ASTSource,
) -> None:
    signature = {
        name: "constexpr" if name in constants else descriptors.get(name) or type_of(name)
        for name in function.arg_names
    }
    places = {(function.arg_names.index(name),): value for name, value in constants.items()}
    source = source_type(function, signature, places, {})
    options = {"num_warps": 4, "num_stages": stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    if function not in (rows.backward_preprocess, decode._decode, rotary._rotate):
        assert "wgmma" in compiled.asm["ptx"]


def compile_branch(kernel: str, **changes: Any) -> None:
    queries, keys = TILES[kernel]
    constants = {
        "RATIOS": (2, 4),
        "SKIP_INNER": False,
        "CAUSAL": True,
        "FIRST": False,
        "LAST": True,
        "EVEN": False,
        "BLOCK_SPARSE": False,
        "HAS_IDS": False,
        "HAS_DOCUMENTS": False,
        "HEAD_DIM": 64,
        "TILE_D": 64,
        "TILE_M": queries,
        "TILE_N": keys,
        **changes,
    }
    if kernel != "forward":
        constants["PARTIAL_RATIO"] = 2
    rows, names = (queries, ("q", "do")) if kernel == "backward_dkdv" else (keys, ("k", "v"))
    descriptors = dict.fromkeys(names, f"tensordesc<bf16[1,{rows},1,1,64]>")
    compile_kernel(getattr(branch, kernel), constants, descriptors, 3)


WINDOW_KERNELS = ("forward", "backward_dq", "backward_sinks", "backward_dkdv")
WINDOWS: list[dict[str, Any]] = [
    {"CAUSAL": True, "HAS_IDS": False},
    {"CAUSAL": False, "HAS_IDS": True},
]


def compile_window(kernels: Sequence[str], changes: dict[str, Any]) -> None:
    for kernel in kernels:
        is_by_key = kernel in ("backward_sinks", "backward_dkdv")
        queries, keys = TILES["backward_dkdv" if is_by_key else kernel]
        constants = {**changes, "HEAD_DIM": 64, "TILE_D": 64, "TILE_M": queries, "TILE_N": keys}
        if not is_by_key:
            constants["HAS_SINKS"] = True
        rows, names = (queries, ("q", "do")) if is_by_key else (keys, ("k", "v"))
        descriptors = dict.fromkeys(names, f"tensordesc<bf16[1,{rows},1,1,64]>")
        compile_kernel(getattr(window_kernels, kernel), constants, descriptors, 3)


def compile_block_sparse(cases: list[tuple[bool, bool]]) -> None:
    sizes = {"HEAD_DIM": 64, "TILE_M": 64, "TILE_N": 64}
    tile = "tensordesc<bf16[64,64]>"
    for first, last in cases:
        constants = {"FIRST": first, "LAST": last, **sizes}
        descriptors = {**dict.fromkeys(("q", "do", "ds"), tile), "offsets": "*i32"}
        compile_kernel(block_sparse_kernels.backward_dkdv, constants, descriptors, 2)
        layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
        described = dict.fromkeys(("q", "k", "v", "do", "ds"), f"tensordesc<bf16[64, 64],{layout}>")
        arguments = {**described, "offsets": "*i32"}
        compile_kernel(hopper.backward_dkdv, constants, arguments, 2, GluonASTSource)
    compile_kernel(block_sparse_kernels.backward_dq, sizes, dict.fromkeys(("k", "ds"), tile), 3)


def compile_whole_segments(head_dim: int, *, is_long: bool = False, **changes: Any) -> None:
    """`is_long`: a sample has 2³¹ elements or more, so that its stride has 64 bits."""
    constants = {
        "RATIOS": (2, 4),
        "SKIP_INNER": False,
        "FIRST": False,
        "LAST": True,
        "HEAD_DIM": head_dim,
        "TILE": 64,
        **changes,
    }
    block = [64, head_dim]
    layout = layout_of(block, 2)
    inputs = dict.fromkeys(("q", "k", "v", "do"), f"tensordesc<bf16{block},{layout}>")
    inputs["dq"] = f"tensordesc<fp32{block},{layout_of(block, 4)}>"
    if is_long:
        names = hopper_forward.forward.arg_names + hopper_backward.backward.arg_names
        long_stride = ("i64", "i32", "i32")
        inputs |= {name: long_stride for name in names if name.endswith("strides")}
    compile_kernel(hopper_forward.forward, constants, inputs, 1, GluonASTSource)
    constants |= {"STAGES": 2, "PARTIAL_RATIO": 2}
    compile_kernel(hopper_backward.backward, constants, inputs, 1, GluonASTSource)


def compile_decode(has_mask: bool) -> None:
    sizes = {"CHUNK": 1024, "TILE": 64, "HEAD_DIM": 128, "TILE_D": 128}
    types = {"keys": "*bf16", "values": "*bf16", "out": "*fp32", "scale": "fp32"}
    types |= dict.fromkeys(("table", "starts", "counts"), "*i64")
    types |= {"visible": "*i1" if has_mask else "*fp32", "slots": "i32"}
    compile_kernel(decode._decode, {"HAS_MASK": has_mask, **sizes}, types, 3)


def compile_rotary(is_back: bool) -> None:
    types = {"packed": "*bf16", "sums": "*fp32" if is_back else "*bf16", "table": "*fp32"}
    types |= {"queries": "i32", "scale": "fp32"}
    sizes = {"HALF": 32, "TILE": 32, "ROWS": rotary.ROWS}
    compile_kernel(rotary._rotate, {"BACK": is_back, **sizes}, types, 3)


if __name__ == "__main__":
    is_all = "--all" in sys.argv
    for i, kernel in enumerate(TILES):
        for changes in CHANGES if is_all else CHANGES[i : i + 1]:
            compile_branch(kernel, **changes)
    for changes in WINDOWS if is_all else WINDOWS[:1]:
        compile_window(WINDOW_KERNELS if is_all else WINDOW_KERNELS[::3], changes)
    compile_kernel(rows.backward_preprocess, {"HEAD_DIM": 64, "TILE_D": 64, "TILE": 64}, {}, 1)
    compile_whole_segments(64, is_long=True)
    if is_all:
        compile_whole_segments(64)
        compile_whole_segments(128)
        compile_whole_segments(64, SKIP_INNER=True, FIRST=True, LAST=False, RATIOS=())
        compile_whole_segments(64, RATIOS=(32, 128, 256))
        compile_whole_segments(64, FIRST=True, RATIOS=(2, 4, 8, 16))
        compile_whole_segments(64, SKIP_INNER=True, LAST=False, RATIOS=())
    for is_back in (True, False) if is_all else (True,):
        compile_rotary(is_back)
    for has_mask in (True, False) if is_all else (True,):
        compile_decode(has_mask)
    compile_block_sparse(
        [(True, True), (True, False), (False, True)] if is_all else [(False, True)]
    )
