"""`longspan generate`: continue prompts with a trained model, which processes may split."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from longspan.config import Layout, Run
from longspan.data.tokenizer import Tokenizer, load_tokenizer
from longspan.device import DTYPES, autocast, choose_device
from longspan.errors import UserError
from longspan.hf_config import cache_root, read_folder_config
from longspan.hf_generation import GenerationSettings, read_generation_settings
from longspan.models import Decoder
from longspan.models.decoding import is_whole, round_weights
from longspan.models.generation import Completion, Piece, Sampling, complete, complete_batch
from longspan.nn import eval_mode
from longspan.parallel.mesh import open_mesh
from longspan.parallel.world import World
from longspan.runfile import load_run
from longspan.trained import HERE, is_huggingface_folder, load_huggingface, load_trained

T = TypeVar("T")
ONE = World()
TEMPERATURE, TOP_P, TOP_K = 0.8, 0.95, 0
"""Where neither the caller nor the model's folder says otherwise."""


@dataclass(frozen=True)
class TextGenerator:
    """A trained model that continues texts."""

    name: str
    run: Run
    model: Decoder
    tokenizer: Tokenizer
    settings: GenerationSettings

    def sampling(
        self,
        count: int,
        *,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        repetition_penalty: float | None = None,
        seed: int = 0,
        stop: Sequence[str] | None = None,
    ) -> Sampling:
        """How to sample; where None, as the model's folder says, or else by our defaults."""
        own = self.settings
        found = Sampling(
            count,
            temperature=_given(temperature, _given(own.temperature, TEMPERATURE)),
            top_p=_given(top_p, _given(own.top_p, TOP_P)),
            top_k=_given(top_k, _given(own.top_k, TOP_K)),
            repetition_penalty=_given(repetition_penalty, own.repetition_penalty),
            seed=seed,
            stop=(*(stop or ()), *own.stop),
            eos=own.eos,
        )
        _check(found)
        return found

    def complete(self, prompt: str, sampling: Sampling) -> Iterator[Piece]:
        """The prompt and then the text that follows it, as it is generated."""
        return complete(self.model, self.tokenizer, prompt, sampling, **self._options)

    def complete_batch(self, prompts: Sequence[str], sampling: Sampling) -> list[Completion]:
        """The texts that follow prompts, generated together."""
        return complete_batch(self.model, self.tokenizer, prompts, sampling, **self._options)

    @property
    def _options(self) -> dict[str, Any]:
        return {
            "device": self.model.embedding.weight.device,
            "context": self.run.data.context,
            "forward_context": partial(autocast, self.run.train),
        }


@contextmanager
def open_generator(
    folder: Path, *, key_file: str = "", world: World = ONE, ema: bool = False
) -> Iterator[TextGenerator]:
    """Load the model of a run folder or a Hugging Face folder.

    Several processes split it by tensor parallelism; all must generate the same texts. With `ema`
    its weights are the averages of `train.ema`.
    """
    layout = Layout(tensor=world.size)
    overrides = [f"layout.tensor={world.size}"] if world.size > 1 else []
    device = choose_device(load_run(None, HERE), world.local_rank)
    with open_mesh(layout, world, device) as mesh:
        if is_huggingface_folder(folder):
            if ema:
                raise UserError(f"--ema needs the folder of a run, but {folder} is of Hugging Face")
            within = cache_root(folder)
            settings = read_generation_settings(folder, within=within)
            overrides.append(f"data.context={read_folder_config(folder).max_positions}")
            run, model = load_huggingface(folder, overrides, mesh)
        else:
            run, model, _ = load_trained(folder, key_file, overrides, mesh, ema=ema)
            settings = GenerationSettings()
        if run.data.source == "recall":
            raise UserError(
                f"{folder} was trained with data.source = {run.data.source!r}, not on text"
            )
        if device.type == "cuda" and is_whole(model) and run.train.precision in DTYPES:
            round_weights(model, DTYPES[run.train.precision])
        tokenizer = load_tokenizer(folder)
        with eval_mode(model):
            yield TextGenerator(folder.resolve().name, run, model, tokenizer, settings)


def _given(value: T | None, default: T) -> T:
    return default if value is None else value


def _check(sampling: Sampling) -> None:
    for name, value, expected, is_right in (
        ("--tokens", sampling.count, ">= 0", sampling.count >= 0),
        ("--temperature", sampling.temperature, ">= 0", 0 <= sampling.temperature < math.inf),
        ("--top-p", sampling.top_p, "in (0, 1]", 0 < sampling.top_p <= 1),
        ("--top-k", sampling.top_k, ">= 0", sampling.top_k >= 0),
        (
            "--repetition-penalty",
            sampling.repetition_penalty,
            "> 0",
            0 < sampling.repetition_penalty < math.inf,
        ),
        ("--seed", sampling.seed, "from 0 to 2^63 - 1", 0 <= sampling.seed < 1 << 63),
        ("--stop", "''", "with at least one character", all(sampling.stop)),
    ):
        if not is_right:
            raise UserError(f"expected {name} {expected}, got {value}")
