"""The parameters and buffers of a model by the names that they have in one process."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from longspan.torch_internals import CHECKPOINT_PREFIX


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """This rank's parameters by their names in one process.

    The last pipeline stage's copy of a tied embedding comes under the embedding's name.
    """
    copy = pipeline_copy(model)
    for name, parameter in model.named_parameters():
        is_copy = parameter is copy
        yield "embedding.weight" if is_copy else name.replace(CHECKPOINT_PREFIX, ""), parameter


def pipeline_copy(model: nn.Module) -> nn.Parameter | None:
    """The copy of a decoder's tied embedding that the last pipeline stage holds, if any."""
    return getattr(model, "pipeline_copy", None)


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong to the model's state, by name."""
    return {
        f"{prefix}.{name}".lstrip(".").replace(CHECKPOINT_PREFIX, ""): buffer
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }
