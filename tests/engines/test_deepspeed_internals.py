"""Private DeepSpeed names: used in one file only, and still defined by the installed DeepSpeed."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from longspan.engines import deepspeed_internals

STAGE_3 = "runtime/zero/stage3.py"
STAGE_1_AND_2 = "runtime/zero/stage_1_and_2.py"
ENGINE = "runtime/engine.py"
PARTITION = "runtime/zero/partition_parameters.py"
FRAGMENT = "utils/tensor_fragment.py"

DEFINED_IN = {
    "_global_grad_norm": (STAGE_3, STAGE_1_AND_2),
    "fp32_partitioned_groups_flat": (STAGE_3,),
    "single_partition_of_fp32_groups": (STAGE_1_AND_2,),
    "grad_position": (STAGE_3,),
    "get_param_id": (STAGE_3,),
    "ds_tensor": (PARTITION,),
    "ds_numel": (PARTITION,),
    "ds_shape": (PARTITION,),
    "_hp_mapping": ("utils/mixed_precision_linkage.py",),
    "lp_fragment_address": (FRAGMENT,),
    "hp_fragment_address": (FRAGMENT,),
    "param_group_index": (FRAGMENT,),
    "_swappable_optimizer_subgroup": (STAGE_3,),
    "_optimizer_states_and_gradient_swap_in": (STAGE_3,),
    "_optimizer_states_and_gradient_swap_out": (STAGE_3,),
    "_release_swap_buffers": (STAGE_3,),
    "update_lp_params": (STAGE_1_AND_2,),
    "_reassign_or_swap_out_partitioned_parameters": (STAGE_3,),
    "persistent_parameters": (STAGE_3,),
    "override_loss_scale": (STAGE_3, STAGE_1_AND_2),
    "torch_autocast_z0_gradscaler": (ENGINE,),
    "torch_autocast_gradscaler": (STAGE_3, STAGE_1_AND_2),
    "__compatible_ops__": ("ops/__init__.py",),
}
"""Every private name that `deepspeed_internals` uses, and the files of DeepSpeed that define it."""
COMMON_NAMES = {"all_gather": (PARTITION,), "partition": (PARTITION,)}
"""Methods that it also calls, of names too common to forbid elsewhere."""

INTERNALS = Path(deepspeed_internals.__file__)
PACKAGE = INTERNALS.parents[1]


def names_in(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def is_defined(name: str, text: str) -> bool:
    """Whether a method, an attribute, a dataclass field or a global of that name is defined."""
    method, attribute, field = rf"def {name}\(", rf"\.{name} = ", rf"^    {name}: "
    global_name = rf'globals\(\)\["{name}"\] = '
    return bool(re.search("|".join((method, attribute, field, global_name)), text, re.MULTILINE))


def test_private_names_are_used_in_one_file_only() -> None:
    found = {
        str(path.relative_to(PACKAGE)): used
        for path in sorted(PACKAGE.rglob("*.py"))
        if path != INTERNALS and (used := names_in(path.read_text()) & DEFINED_IN.keys())
    }
    assert not found, f"use these names in {INTERNALS.name} only: {found}"


def test_the_list_has_every_private_name() -> None:
    text = INTERNALS.read_text()
    used = set(re.findall(r"self\._(?:zero|engine)\.(\w+)", text))
    assert used | names_in(text) & DEFINED_IN.keys() == set(DEFINED_IN)


@pytest.mark.parametrize(("name", "files"), [*DEFINED_IN.items(), *COMMON_NAMES.items()])
def test_deepspeed_still_defines(name: str, files: tuple[str, ...]) -> None:
    """Read the source, without importing it: no accelerator is chosen and nothing is compiled."""
    spec = find_spec("deepspeed")
    if spec is None or spec.origin is None:
        pytest.skip("needs DeepSpeed")
    for file in files:
        path = Path(spec.origin).parent / file
        assert path.exists(), f"{file}, which defined {name}, is gone: see {INTERNALS.name}"
        assert is_defined(name, path.read_text()), f"{file} no longer defines {name}"
