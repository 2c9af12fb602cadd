"""The steps of a run whose length is given in epochs."""

from __future__ import annotations

import math

from longspan.config import Data, Model, Train
from longspan.errors import UserError


def with_steps(train: Train, data: Data, model: Model) -> Train:
    """[train] with the steps that its epochs take: passes over the windows of the training split.

    UserError says why there are none.
    """
    assert train.epochs is not None
    if model.factory or data.mix is not None or data.source == "recall":
        what = "data.mix, whose sources end at different steps" if data.mix else "recall"
        what = "a model.factory" if model.factory else what
        raise UserError(f"needs data of a known size, which {what} has not: set train.steps")
    from longspan.data.opening import open_source  # numpy and more, which most runs need not load
    from longspan.data.source import TokenSource

    try:
        source = open_source(data, model)
    except UserError as error:
        raise UserError(f"needs the size of the data, here: {error}") from error
    assert isinstance(source, TokenSource)
    steps = math.ceil(train.epochs * source.num_windows("train") / train.global_batch)
    values = {"steps": steps}
    if "warmup_steps" not in train.model_fields_set:
        values["warmup_steps"] = min(train.warmup_steps, steps)
    return train.model_copy(update=values)
