"""What changes the loss, the steps or the weights of a run, the same under every layout."""

from __future__ import annotations

import pytest
import torch

from longspan.errors import UserError
from longspan.runfile import load_run
from tests.harness import Ranks
from tests.parallel.test_apply import ids, single_process_steps, steps_of
from tests.steps import assert_same_steps

Z_LOSS = "train.z_loss=0.5"


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (2, ["layout.pipeline=2"]),
        (4, ["layout.sequence=2", "layout.tensor=2", "layout.megatron_sequence_parallel=true"]),
    ],
    ids=ids,
)
def test_z_loss_takes_the_same_steps_in_a_layout(
    ranks: Ranks, world: int, layout: list[str]
) -> None:
    alone, without = single_process_steps(Z_LOSS), single_process_steps()
    assert_same_steps(ranks.run(steps_of, world, [*layout, Z_LOSS]), alone)
    torch.testing.assert_close(alone.losses[0, 0], without.losses[0, 0])  # the cross-entropy
    assert alone.losses[0, 1] > 1.01 * without.losses[0, 1]  # but not its gradient


def test_z_loss_with_a_model_of_your_own_is_refused() -> None:
    with pytest.raises(UserError, match=r"(?m)^  train.z_loss +is not supported"):
        load_run(None, ["model.factory=a:b", "train.z_loss=1e-4"])
