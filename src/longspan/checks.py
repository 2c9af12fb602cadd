"""Checks of plain values that the run file and the operators share. Each returns what is wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping

from longspan.wording import counted


def branch_problems(segment_lengths: tuple[int, ...], dilation_rates: tuple[int, ...]) -> list[str]:
    """Return why these cannot be the branches of a dilated pattern."""
    if len(segment_lengths) != len(dilation_rates) or not segment_lengths:
        return [
            "segment_lengths and dilation_rates need one entry per branch, got "
            f"{len(segment_lengths)} and {len(dilation_rates)}"
        ]
    problems = []
    for w, r in zip(segment_lengths, dilation_rates, strict=True):
        if w < 1 or r < 1:
            problems.append(f"segment length and dilation rate must be at least 1, got {w} and {r}")
        elif w % r:
            nearest = max(r, round(w / r) * r)
            problems.append(
                f"segment length {w} must be a multiple of its dilation rate {r}: use {nearest}"
            )
    return problems


def block_problem(tokens: int, block_size: int) -> str | None:
    """Return why this number of tokens is not a whole number of blocks."""
    if tokens % block_size == 0:
        return None
    return (
        f"must be a multiple of block_size = {block_size}, got {tokens}: "
        f"use {round(tokens / block_size) * block_size}"
    )


def backend_problem(backend: str, device: str, ranks: Mapping[str, int]) -> str | None:
    """Return why a backend cannot connect these ranks per axis on "cpu" or "cuda" devices."""
    if backend == "nccl" and device == "cpu":
        return '"nccl" connects GPUs, but the device is a CPU: use "auto" or "gloo"'
    others = [axis for axis, n in ranks.items() if n > 1 and axis != "replicate"]
    if backend == "gloo" and device == "cuda" and others:
        return (
            '"gloo" can all-reduce and broadcast CUDA tensors, but not gather or scatter them, as '
            f'layout.{others[0]} = {ranks[others[0]]} needs: use "nccl", or layout.replicate as '
            "the only axis"
        )
    return None


def layout_problems(ranks: Mapping[str, int], world: int) -> list[str]:
    """Return why these ranks per axis do not cover `world` processes."""
    if zeros := [axis for axis, n in ranks.items() if n == 0]:
        return [
            f"{axis} must be at least 1, or -1 for the remaining devices, got 0" for axis in zeros
        ]
    rest = [axis for axis, n in ranks.items() if n == -1]
    if len(rest) > 1:
        return [f"only one axis can be -1 (the remaining devices), got {', '.join(rest)}"]
    fixed = math.prod(n for n in ranks.values() if n > 0)
    if world % fixed or (not rest and fixed != world):
        product = " × ".join(f"{axis} {n}" for axis, n in ranks.items() if n > 1)
        needed = f"a multiple of {fixed} processes" if rest else counted(fixed, "process")
        there = "there is 1" if world == 1 else f"there are {world}"
        return [
            f"{product or 'one rank per axis'} needs {needed}, but {there}: change the layout, or "
            f"start {fixed} processes (--nproc {fixed}; of a plan: --gpus {fixed})"
            if fixed > 1
            else f"one rank per axis needs 1 process, but {there}: set an axis, such as "
            f"layout.shard={world}"
        ]
    return []
