"""The small files of the Hugging Face folder that a run started from, kept for its export.

The run folder has copies, so that the folder may be removed: tokenizer, chat template, generation
settings, and config.json for the ids of special tokens.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from longspan.config import Run
from longspan.data.tokenizer import MAX_BYTES, TOKENIZER, JsonTokenizer, Tokenizer
from longspan.errors import UserError
from longspan.files import parse_json_object, read_bounded, read_json_object
from longspan.hf_config import CONFIG, cache_root

SIDE_FOLDER = "huggingface"
"""Name of the folder of copies in a run folder."""
GENERATION_CONFIG = "generation_config.json"
TOKENIZER_FILES = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def copy_side_files(run: Run, run_dir: Path) -> None:
    """Copy the files of the folder that a new run starts from; those of an earlier start go."""
    given = run.train.init_from or run.model.folder
    copy_known_files(Path(given) if given else None, run_dir)


def copy_known_files(given: Path | None, run_dir: Path) -> None:
    """Copy the files that a run folder keeps of a Hugging Face folder, regular ones alone."""
    target = run_dir / SIDE_FOLDER
    if target.is_symlink():
        raise UserError(f"{target} is a link: remove it, so that nothing elsewhere is changed")
    try:
        for name in (*TOKENIZER_FILES, GENERATION_CONFIG, CONFIG):
            (target / name).unlink(missing_ok=True)
            if given is not None and os.path.lexists(given / name):
                content = read_bounded(given / name, MAX_BYTES, within=cache_root(given))
                target.mkdir(parents=True, exist_ok=True)
                (target / name).write_bytes(content)
    except OSError as error:
        raise UserError(f"cannot write the run folder {run_dir}: {error.strerror}") from error


def is_tokenizer_of(folder: Path, tokenizer: Tokenizer | None) -> bool:
    """Whether a Hugging Face folder has this tokenizer."""
    path = folder / TOKENIZER
    if not isinstance(tokenizer, JsonTokenizer) or not os.path.lexists(path):
        return False
    theirs = JsonTokenizer(path, within=cache_root(folder))
    return theirs.to_json() == tokenizer.to_json()


def special_ids_of(folder: Path) -> dict[str, Any]:
    """The ids of special tokens in a folder's config.json."""
    config = read_json_object(folder / CONFIG, MAX_BYTES, within=folder)
    return {name: config.get(name) for name in SPECIAL_IDS}


def tokenizer_problems(folder: Path, vocab: int) -> list[str]:
    """What is wrong with the tokenizer in a folder, if there is one, for a vocabulary."""
    path = folder / TOKENIZER
    if not os.path.lexists(path):
        return []
    content = read_bounded(path, MAX_BYTES, within=cache_root(folder))
    try:
        size = _vocabulary(parse_json_object(content))
    except (ValueError, TypeError) as error:
        return [f"{TOKENIZER}: {error}"]
    if size <= vocab:
        return []
    return [f"{TOKENIZER} has {size:,} tokens, more than the vocab_size = {vocab:,} of {CONFIG}"]


def _vocabulary(tokenizer: dict[str, Any]) -> int:
    """The largest id of a tokenizer of the `tokenizers` library, plus 1."""
    model = tokenizer.get("model")
    vocab = model.get("vocab", {}) if isinstance(model, dict) else {}
    ids = list(vocab.values()) if isinstance(vocab, dict) else [len(vocab) - 1]  # Unigram: a list
    added = tokenizer.get("added_tokens") or []
    ids += [token.get("id") for token in added if isinstance(token, dict)]
    if not all(type(token) is int for token in ids):
        raise ValueError("expected an integer as the id of each token")
    return max(ids, default=-1) + 1
