"""Residual dropout: a hash of where an element is, and nothing else."""

from __future__ import annotations

import pytest
import torch

from longspan.nn import Dropout
from longspan.runfile import load_run
from tests.parallel.test_apply import OPTIONS
from tests.steps import open_state

MASK = (1 << 32) - 1


def hashed(state: int, *indices: int) -> int:
    """The hash in Python's integers, which do not overflow."""
    for i in indices:
        x = (state + i * 0x85EBCA77) & MASK
        x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
        x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
        state = x ^ (x >> 16)
    return state


def test_a_mask_is_a_hash_of_seed_sample_position_site_and_feature() -> None:
    dropout, samples = Dropout(0.3, seed=5), [0, 7, (3 << 31) + 11]
    keys = dropout.keys(torch.tensor(samples), torch.tensor([2, 9]))
    found = dropout(torch.ones(3, 2, 4), keys, 6)
    for i, sample in enumerate(samples):
        for j, position in enumerate((2, 9)):
            for feature in range(4):
                indices = (sample >> 31, sample % (1 << 31), position, 6, feature)
                is_kept = hashed(5, *indices) >= 0.3 * 2**32
                assert found[i, j, feature].item() == pytest.approx(is_kept / 0.7)


@pytest.mark.gpu
def test_a_compiled_block_drops_the_same_on_a_gpu() -> None:
    dropout, x = Dropout(0.3, seed=5), torch.ones(2, 64, 1024)
    keys = dropout.keys(torch.tensor([7, (3 << 31) + 11]), torch.arange(64))
    compiled = torch.compile(lambda x, keys: dropout(x, keys, 6))
    found = compiled(x.cuda(), keys.cuda()).cpu()
    assert torch.equal(found == 0, dropout(x, keys, 6) == 0)


def test_parts_of_tokens_and_features_are_parts_of_the_whole_mask() -> None:
    samples, positions = torch.tensor([1, 2]), torch.arange(6)
    whole = Dropout(0.5, seed=1)
    expected = whole(torch.ones(2, 6, 8), whole.keys(samples, positions), 1)
    tokens, features = Dropout(0.5, seed=1), Dropout(0.5, seed=1)
    tokens.split_tokens(1, 2)
    features.split_features(1, 4)
    part = tokens(torch.ones(2, 3, 8), tokens.keys(samples, positions), 1)
    assert torch.equal(part, expected[:, 3:])
    part = features(torch.ones(2, 6, 4), features.keys(samples, positions), 1)
    assert torch.equal(part, expected[:, :, 4:])


def test_masks_are_about_independent_and_keep_the_mean() -> None:
    dropout, x = Dropout(0.2, seed=0), torch.ones(4, 128, 64)
    keys = dropout.keys(torch.arange(4), torch.arange(128))
    masks = torch.stack([dropout(x, keys, site) for site in range(4)]).double()
    assert masks.mean().item() == pytest.approx(1, abs=0.01)
    centred = (masks - 1).transpose(0, 1).flatten(1)  # by sample
    by_site = (masks - 1).flatten(1)
    for rows in (centred, by_site, (masks - 1)[0].flatten(0, 1).T):
        correlation = torch.corrcoef(rows) - torch.eye(len(rows))
        assert correlation.abs().max() < 6 / rows.shape[1] ** 0.5


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_only_training_drops(dropout: float) -> None:
    run = load_run(None, [*OPTIONS, f"model.dropout={dropout}"])
    with open_state(run) as (state, data):
        batch, _ = data.read(range(2), range(2))
        tokens, targets = batch.tokens, batch.targets
        model = state.engine.model
        evaluated, trained = model(tokens, targets), model(tokens, targets, None, batch.samples)
        assert (evaluated == trained) == (dropout == 0)
        assert batch.samples.tolist() == [0, 1]
