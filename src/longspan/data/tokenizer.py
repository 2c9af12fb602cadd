"""Tokenizers: a built-in byte tokenizer, and any JSON file of the `tokenizers` library."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from longspan.errors import UserError

TOKENIZER = "tokenizer.json"


class Tokenizer(Protocol):
    name: str
    vocab: int
    eos: int | None
    """The id of the end-of-document token, if the tokenizer has one."""
    eos_token: str | None
    """The text of that token."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: list[int]) -> str: ...


class ByteTokenizer:
    """Maps each UTF-8 byte to a token; NUL, which does not occur in text, ends a document."""

    name = "bytes"
    vocab = 256
    eos: int | None = 0
    eos_token: str | None = "\0"

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")


class JsonTokenizer:
    """A tokenizer saved by the `tokenizers` library as one JSON file."""

    _EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")

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
        # The file may hold the limits of the model it was made for; we never truncate or pad.
        self._inner.no_truncation()
        self._inner.no_padding()
        self.name = path.name
        self.vocab = max(self._inner.get_vocab().values(), default=0) + 1  # ids may have gaps
        names = (name for name in self._EOS_NAMES if self._inner.token_to_id(name) is not None)
        self.eos_token: str | None = next(names, None)
        self.eos: int | None = None
        if self.eos_token is not None:
            self.eos = self._inner.token_to_id(self.eos_token)

    def encode(self, text: str) -> list[int]:
        try:
            return list(self._inner.encode(text, add_special_tokens=False).ids)
        except Exception as error:  # the library raises no narrower one
            raise UserError(
                f"the tokenizer {self.name} cannot encode this text: {error}"
            ) from error

    def to_json(self) -> str:
        return str(self._inner.to_str())

    def decode(self, tokens: list[int]) -> str:
        return str(self._inner.decode(tokens))


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer from the JSON file in `folder`, or return the byte tokenizer."""
    path = folder / TOKENIZER
    return JsonTokenizer(path) if path.exists() else ByteTokenizer()
