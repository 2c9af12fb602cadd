"""Tokenizers: a built-in byte tokenizer, and any JSON file of the `tokenizers` library."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from longspan.errors import UserError
from longspan.files import atomic_write_text, read_bounded, read_json_object
from longspan.vocabulary import MAX_VOCAB

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
MAX_BYTES = 1 << 27
"""Size of a tokenizer's files; those of 250,000 tokens have some 2²⁵."""


Edges = Sequence[int]
"""Numbers of characters from the beginning of a text."""
Marked = tuple[NDArray[Any], list[int]]
"""The tokens of a text, and for each edge how many of them end in these characters. So a token that
lies on both sides of an edge belongs to what follows the edge."""


class Tokenizer(Protocol):
    name: str
    vocab: int
    eos: int | None
    """The id of the end-of-document token, if the tokenizer has one."""
    eos_token: str | None
    """The text of that token."""
    bos: tuple[int, ...]
    """Ids that begin every document and prompt, such as the <s> of Llama; usually none or one."""

    def encode(self, text: str) -> list[int]: ...
    def encode_batch(self, texts: Sequence[str], edges: Sequence[Edges]) -> list[Marked]: ...
    def decode(self, tokens: list[int]) -> str: ...


class ByteTokenizer:
    """Maps each UTF-8 byte to a token; NUL, which does not occur in text, ends a document."""

    name = "bytes"
    vocab = 256
    eos: int | None = 0
    eos_token: str | None = "\0"
    bos: tuple[int, ...] = ()

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_batch(self, texts: Sequence[str], edges: Sequence[Edges]) -> list[Marked]:
        return [
            (
                np.frombuffer(text.encode("utf-8"), dtype=np.uint8),
                [len(text[:edge].encode("utf-8")) for edge in of_text],
            )
            for text, of_text in zip(texts, edges, strict=True)
        ]

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")


class JsonTokenizer:
    """A tokenizer saved by the `tokenizers` library as one JSON file.

    Its end-of-text token is `eos`, else the eos_token of a tokenizer_config.json beside the file,
    else the first of the usual names that it knows.
    """

    EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")

    def __init__(self, path: Path, *, eos: str | None = None, within: Path | None = None) -> None:
        """`within`: the folder that symbolic links may not leave."""
        content = read_bounded(path, MAX_BYTES, within=within)
        try:
            from tokenizers import Tokenizer as Loaded
        except ImportError as error:
            raise UserError(
                f"{path} needs the tokenizers package: pip install 'longspan[tokenizers]'"
            ) from error
        with _library_errors(f"{path} is not a tokenizers JSON file"):
            self._inner = Loaded.from_str(content.decode("utf-8"))
            # The file may hold the limits of the model it was made for; we never truncate or pad.
            self._inner.no_truncation()
            self._inner.no_padding()
            self.vocab = max(self._inner.get_vocab().values(), default=0) + 1  # ids may have gaps
            self.bos = self._find_bos()
        if self.vocab > MAX_VOCAB:
            raise UserError(
                f"{path} has a token of id {self.vocab - 1}: expected ids below {MAX_VOCAB:,}"
            )
        if any(token >= self.vocab for token in self.bos):
            raise UserError(f"{path} begins texts with the token {max(self.bos)}, which it lacks")
        self.sha256 = hashlib.sha256(content).hexdigest()
        stem = path.parent.resolve().name if path.name == TOKENIZER else path.name
        self.name = "".join(character for character in stem if character.isprintable())[:255]
        self.eos_token, self.eos = self._find_eos(path, eos)

    def _find_bos(self) -> tuple[int, ...]:
        """What the tokenizer puts before a text where it adds special tokens."""
        # Some know neither this text nor a token for what they do not know.
        for text in ("a", *islice(self._inner.get_vocab(), 100)):
            try:
                with _library_errors("of the next text we may learn more"):
                    encode = partial(self._inner.encode, text)
                    plain, whole = (encode(add_special_tokens=x).ids for x in (False, True))
            except UserError:
                continue
            for start in range(len(whole) - len(plain) + 1):
                if plain and whole[start : start + len(plain)] == plain:
                    return tuple(whole[:start])
        return ()

    def _find_eos(self, path: Path, given: str | None) -> tuple[str | None, int | None]:
        config, named, where = path.parent / TOKENIZER_CONFIG, given, "--eos"
        if named is None and os.path.lexists(config):
            named, where = read_json_object(config, MAX_BYTES).get("eos_token"), str(config)
            if isinstance(named, dict):
                named = named.get("content")  # as older versions of transformers write it
        if named is None:
            known = (name for name in self.EOS_NAMES if self._inner.token_to_id(name) is not None)
            named = next(known, None)
        if named is None:
            return None, None
        found = self._inner.token_to_id(named) if _is_text(named) else None
        if found is None:
            raise UserError(
                f"{where} names the end-of-text token {named!r}, which {path} does not have: "
                "name one of its tokens with --eos"
            )
        return named, found

    def encode(self, text: str) -> list[int]:
        with _library_errors(f"the tokenizer {self.name} cannot encode this text"):
            return list(self._inner.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str], edges: Sequence[Edges]) -> list[Marked]:
        """As the protocol says; the library uses all cores, unless TOKENIZERS_PARALLELISM=0."""
        inner = self._inner
        encode = inner.encode_batch if any(edges) else inner.encode_batch_fast  # without offsets
        with _library_errors(f"the tokenizer {self.name} cannot encode this text"):
            found = encode(list(texts), add_special_tokens=False)
        return [
            (
                np.asarray(encoding.ids, dtype=np.int64),
                np.searchsorted([end for _, end in encoding.offsets], of_text, "right").tolist()
                if of_text
                else [],
            )
            for encoding, of_text in zip(found, edges, strict=True)
        ]

    def to_json(self) -> str:
        return str(self._inner.to_str())

    def save(self, folder: Path) -> None:
        """Write the tokenizer, and which token ends a text, for `load_tokenizer`."""
        atomic_write_text(folder / TOKENIZER, self.to_json())
        config = json.dumps({"eos_token": self.eos_token}, indent=1) + "\n"
        atomic_write_text(folder / TOKENIZER_CONFIG, config)

    def decode(self, tokens: list[int]) -> str:
        with _library_errors(f"the tokenizer {self.name} cannot decode these tokens"):
            return str(self._inner.decode(tokens))


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer from the JSON file in `folder`, or return the byte tokenizer."""
    path = folder / TOKENIZER
    return JsonTokenizer(path, within=folder) if os.path.lexists(path) else ByteTokenizer()


def _is_text(value: object) -> bool:
    try:
        return isinstance(value, str) and bool(value.encode())
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell
        return False


@contextmanager
def _library_errors(message: str) -> Iterator[None]:
    """Raise what the `tokenizers` library raises, also a panic of its Rust code, as UserError."""
    try:
        yield
    except BaseException as error:  # its errors are plain Exceptions, and a panic not even that
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{message}: {error}") from error
