"""Writes a run's tokenizer in the files that transformers loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from longspan.config import Run
from longspan.data.tokenizer import TOKENIZER, JsonTokenizer, Tokenizer, load_tokenizer


def tokenizer_of(run_dir: Path, run: Run) -> Tokenizer | None:
    """Return the tokenizer of a run; the recall task has none."""
    return None if run.data.source == "recall" else load_tokenizer(run_dir)


def special_ids(tokenizer: Tokenizer | None) -> dict[str, int | None]:
    """Return the ids for config.json and generation_config.json.

    Data is built without a beginning-of-sequence token and without padding. A missing id would mean
    the one of Llama's tokenizer, so they are null.
    """
    eos = tokenizer.eos if tokenizer else None
    return {"bos_token_id": None, "eos_token_id": eos, "pad_token_id": None}


def write_tokenizer(folder: Path, tokenizer: Tokenizer, context: int) -> None:
    """Write tokenizer.json and tokenizer_config.json for `AutoTokenizer.from_pretrained`."""
    if isinstance(tokenizer, JsonTokenizer):
        content = json.loads(tokenizer.to_json())
        # Ours adds no special tokens when it encodes, and the model has not seen any there.
        if (content.get("post_processor") or {}).get("type") != "ByteLevel":
            content["post_processor"] = None
    else:
        content = byte_tokenizer_json(tokenizer.eos_token)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": tokenizer.eos_token,
        "pad_token": None,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    _write(folder / TOKENIZER, content)
    _write(folder / "tokenizer_config.json", config)


def byte_tokenizer_json(eos: str | None) -> dict[str, Any]:
    """Return the byte tokenizer as a file of the `tokenizers` library: the ids are the byte values.

    Its ByteLevel step turns each UTF-8 byte into a printable character. The end-of-document token
    is a special token, which is matched in the text before that step, so its entry is NUL itself.
    """
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    assert eos == "\0"
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 0, "content": eos, **flags, "special": True}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {eos: 0} | {_byte_character(byte): byte for byte in range(1, 256)},
            "merges": [],
        },
    }


def _byte_character(byte: int) -> str:
    """The character for a byte in ByteLevel: Latin-1's own if printable, else from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    if byte in printable:
        return chr(byte)
    return chr(0x100 + sum(other not in printable for other in range(byte)))


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
