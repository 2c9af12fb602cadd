"""Residual dropout without state: what is dropped is a hash of where it is.

A mask depends on the seed, on the index of the sample in the endless order of a run, on the token's
position in it, on the layer and on the feature; so on no layout, no micro-batch, no recomputation
and no resume.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longspan.hashing import FACTOR, fold32

MAX_INDEX = 1 << 31
"""Of an index that is hashed at once."""


class Dropout:
    """Drops elements of the residual stream with probability `p`, and scales the others."""

    def __init__(self, p: float, seed: int) -> None:
        self.p, self._seed = p, seed % (1 << 32)
        self._token_part, self._first_feature = (0, 1), 0

    def split_tokens(self, rank: int, ranks: int) -> None:
        """Let this rank have one of `ranks` equal parts of the tokens of the residual stream."""
        self._token_part = rank, ranks

    def split_features(self, rank: int, features: int) -> None:
        """Let this rank have `features` features of the residual stream, after those before it."""
        self._first_feature = rank * features

    def keys(self, samples: Tensor, positions: Tensor) -> Tensor:
        """A hash of each token: int64 (batch, tokens) of samples (batch,) and positions (tokens,).

        Of this rank's part of the tokens, if ranks split them.
        """
        rank, ranks = self._token_part
        positions = positions.to(samples.device).chunk(ranks)[rank]
        sample = samples[:, None]
        return fold32(self._seed, sample // MAX_INDEX, sample % MAX_INDEX, positions[None])

    def keys_of_layer(self, keys: Tensor | None, layer: int) -> Tensor | None:
        """Keys with which the sites 1 and 2 are those of a layer: `site` + 2 · `layer`.

        A block with the number of its layer would be compiled anew for each.
        """
        return None if keys is None else (keys + 2 * layer * FACTOR) % (1 << 32)

    def __call__(self, x: Tensor, keys: Tensor | None, site: int) -> Tensor:
        """x (batch, tokens, features) with elements dropped; unchanged without `keys`.

        `site`: which of the model's dropouts it is.
        """
        if keys is None:
            return x
        first = self._first_feature
        features = torch.arange(first, first + x.shape[-1], device=x.device)
        drawn = fold32(keys[..., None], site, features)
        return torch.where(drawn >= int(self.p * 2**32), x * (1 / (1 - self.p)), 0.0)
