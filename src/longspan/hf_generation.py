"""The generation_config.json of a Hugging Face folder: what ends a text, and how to sample.

What would change the text and is not supported is refused by its name.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspan.errors import UserError
from longspan.files import read_json_object

GENERATION_CONFIG = "generation_config.json"
MAX_BYTES = 1 << 20

WITHOUT_EFFECT = {
    *("_from_model_config", "transformers_version", "bos_token_id", "pad_token_id"),
    *("decoder_start_token_id", "max_length", "max_new_tokens", "max_time", "use_cache"),
    *("cache_implementation", "cache_config", "return_legacy_cache", "return_dict_in_generate"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits"),
    *("prefill_chunk_size", "disable_compile", "compile_config", "early_stopping"),
    *("length_penalty", "low_memory", "generation_kwargs", "chat_format"),
}
"""Keys that do not change which tokens are likely; the last ones act in beam search only."""
NEUTRAL: dict[str, Any] = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "typical_p": 1.0,
    "encoder_repetition_penalty": 1.0,
    "guidance_scale": 1.0,
}
"""Keys that are not supported, with the value that has no effect; of all others it is 0 or none."""


@dataclass(frozen=True)
class GenerationSettings:
    """What generation_config.json says; None where it says nothing."""

    eos: frozenset[int] | None = None
    stop: tuple[str, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float = 1.0


def read_generation_settings(folder: Path, *, within: Path) -> GenerationSettings:
    """Read the file in a folder; without one, nothing is set. Links stay `within` a folder."""
    path = folder / GENERATION_CONFIG
    if not os.path.lexists(path):
        return GenerationSettings()
    found = read_json_object(path, MAX_BYTES, within=within)
    do_sample = found.pop("do_sample", False)
    penalty = found.pop("repetition_penalty", None)
    given = {name: found.pop(name, None) for name in ("temperature", "top_p", "top_k")}
    eos, stop = found.pop("eos_token_id", None), found.pop("stop_strings", None)
    problems = [
        f"{name} = {value!r} is not supported: remove it, or set it to {NEUTRAL.get(name)!r}"
        for name, value in found.items()
        if name not in WITHOUT_EFFECT and value and value != NEUTRAL.get(name)
    ]
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(token) is int and token >= 0 for token in ids):
        problems.append(f"eos_token_id must be an id or a list of them, got {eos!r}")
    stops = stop if isinstance(stop, list) else [] if stop is None else [stop]
    if not all(isinstance(text, str) and text for text in stops):
        problems.append(f"stop_strings must be a text or a list of them, got {stop!r}")
    for name, value in {**given, "repetition_penalty": penalty}.items():
        if value is not None and (type(value) not in (int, float) or value < 0):
            problems.append(f"{name} must be a number of at least 0, got {value!r}")
    if problems:
        raise UserError("\n    ".join([f"cannot generate as {path} says:", *problems]))
    if not do_sample:  # then these have no effect
        given = dict.fromkeys(given)
    return GenerationSettings(
        frozenset(ids) if ids else None, tuple(stops), **given, repetition_penalty=penalty or 1.0
    )
