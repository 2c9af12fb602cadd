"""Tokenizers: bytes, built in, and any `tokenizers` JSON file."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from longspan.errors import UserError


class Tokenizer(Protocol):
    name: str
    vocab: int
    end: int | None
    """The token put at the end of each document, where the tokenizer has one."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: list[int]) -> str: ...


class ByteTokenizer:
    """A token per UTF-8 byte; NUL, which text does not hold, ends a document."""

    name = "bytes"
    vocab = 256
    end: int | None = 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")


class JsonTokenizer:
    """A tokenizer saved by the `tokenizers` library as one JSON file."""

    _END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer as Loaded
        except ImportError as error:
            raise UserError(
                f"{path} needs the tokenizers package: pip install 'longspan[tokenizers]'"
            ) from error
        try:
            self._inner = Loaded.from_str(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"cannot read the tokenizer {path}: {error.strerror}") from error
        except Exception as error:  # the library raises no narrower one
            raise UserError(f"{path} is not a tokenizers JSON file: {error}") from error
        self.name = path.name
        self.vocab = int(self._inner.get_vocab_size())
        ends = (self._inner.token_to_id(name) for name in self._END_NAMES)
        self.end: int | None = next((end for end in ends if end is not None), None)

    def encode(self, text: str) -> list[int]:
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: list[int]) -> str:
        return str(self._inner.decode(tokens))


def open_tokenizer(path: Path | None) -> Tokenizer:
    """The tokenizer in a JSON file, or the byte tokenizer for None."""
    return ByteTokenizer() if path is None else JsonTokenizer(path)
