"""Documents on their way into token shards: their text in pieces, and which of it has a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from longspan.errors import UserError

PIECE = 1 << 21
"""Characters that are encoded at once. A longer document is cut after a line, or else a word; there
its tokens may differ from those of the whole text, if the tokenizer is not bytes."""

Split = Literal["train", "validation"]
Span = tuple[int, int]
"""First position, and the one after the last."""


@dataclass(frozen=True)
class Document:
    pieces: Callable[[], Iterable[str]]
    """Reads the text from its beginning."""
    split: Split | None = None
    """Set if the input itself names its split."""
    loss: tuple[Span, ...] | None = None
    """The characters that have a loss, in increasing order; None for all of them."""
    end_has_loss: bool = True
    """Whether the end-of-text token after it has a loss."""
    has_special: bool = True
    """Whether beginning and end-of-text tokens are added; chat templates have their own."""


@dataclass(frozen=True)
class Fields:
    """Which fields of a record, of JSON Lines or a dataset, make a document."""

    text: str = "text"
    loss: str | None = None
    """A list of [first, stop] pairs: the characters of the text that have a loss."""
    prompt: str | None = None
    answer: str | None = None
    """With `prompt`, in place of `text`: the answer follows the prompt, and it alone has a loss."""
    chat: str | None = None
    """In place of `text`: a list of messages, of which those of the assistant have a loss."""

    def __post_init__(self) -> None:
        if (self.prompt is None) != (self.answer is None):
            raise UserError("--prompt and --answer name the fields of a pair: give both")
        if self.answer is not None and (self.loss is not None or self.text != "text"):
            raise UserError("--prompt and --answer take the place of --field and --loss")
        others = self.answer is not None or self.loss is not None or self.text != "text"
        if self.chat is not None and others:
            raise UserError("--chat takes the place of --field, --loss, --prompt and --answer")

    @property
    def has_mask(self) -> bool:
        """Whether the fields say which tokens have a loss."""
        return any(x is not None for x in (self.chat, self.answer, self.loss))

    @property
    def names(self) -> tuple[str, ...]:
        """The fields that every record has."""
        if self.chat is not None:
            return (self.chat,)
        if self.prompt is not None and self.answer is not None:
            return self.prompt, self.answer
        return (self.text,) if self.loss is None else (self.text, self.loss)


class Template(Protocol):
    def render(self, messages: Any, where: str) -> tuple[str, tuple[Span, ...]]:
        """The text of a conversation, and the spans of it that have a loss."""
        ...


def document_of(
    record: object,
    fields: Fields,
    where: str,
    split: Split | None = None,
    template: Template | None = None,
) -> Document:
    """The document that a record holds; `where`: names the record in errors."""
    if fields.chat is not None:
        assert template is not None
        if not isinstance(record, dict) or fields.chat not in record:
            raise UserError(f"{where} has no field {fields.chat!r}, {_got(record)}: set --chat")
        text, spans = template.render(record[fields.chat], where)
        return Document(_in_memory(text), split, spans, has_special=False)
    if fields.prompt is not None and fields.answer is not None:
        prompt = _text_of(record, fields.prompt, where, "set --prompt")
        text = prompt + _text_of(record, fields.answer, where, "set --answer")
        return Document(_in_memory(text), split, ((len(prompt), len(text)),))
    text = _text_of(record, fields.text, where, "set --field, --prompt and --answer, or --chat")
    if fields.loss is None:
        return Document(_in_memory(text), split)
    assert isinstance(record, dict)
    spans = _spans_of(record.get(fields.loss), len(text), f"{where}: the field {fields.loss!r}")
    return Document(_in_memory(text), split, spans, bool(spans) and spans[-1][1] == len(text))


def streamed(pieces: Callable[[], Iterator[str]], size: int) -> Document:
    """A document of a file of `size` bytes: one that is short is read once and kept."""
    if size > PIECE:
        return Document(pieces)
    kept = list(pieces())
    return Document(lambda: kept)


def cut(read: Callable[[int], str]) -> Iterator[str]:
    """Yield a text in pieces, cut after a line, or else a word, if it is longer than one."""
    text = read(PIECE)
    while text:
        following = read(PIECE)
        end = len(text)
        if following:
            end = text.rfind("\n") + 1 or text.rfind(" ") + 1 or end
        yield text[:end]
        text = text[end:] + following


def clipped(spans: Iterable[Span], first: int, stop: int) -> list[Span]:
    """The parts of `spans` within [first, stop), relative to `first`."""
    within = ((max(a, first) - first, min(b, stop) - first) for a, b in spans)
    return [(a, b) for a, b in within if a < b]


def _in_memory(text: str) -> Callable[[], Iterator[str]]:
    def pieces() -> Iterator[str]:
        slices = (text[start : start + PIECE] for start in range(0, len(text), PIECE))
        return cut(lambda _: next(slices, ""))

    return pieces


def _text_of(record: object, name: str, where: str, advice: str) -> str:
    text = record.get(name) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise UserError(f"{where} has no text in the field {name!r}, {_got(record)}: {advice}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where} is not text: {error}") from error
    return text


def _got(record: object) -> str:
    if isinstance(record, dict):
        return f"got fields {', '.join(record)}"
    return f"got {type(record).__name__}"


def _spans_of(value: Any, length: int, where: str) -> tuple[Span, ...]:
    """The spans of characters that a record lists, which increase and do not overlap."""
    expected = f"expected pairs [first, stop] of characters that increase up to {length:,}"
    if not isinstance(value, list):
        raise UserError(f"{where} is {type(value).__name__}: {expected}")
    last, spans = 0, []
    for pair in value:
        is_pair = isinstance(pair, list) and len(pair) == 2 and {type(x) for x in pair} == {int}
        if not is_pair or not last <= pair[0] < pair[1] <= length:
            raise UserError(f"{where} has {str(pair)[:100]}: {expected}")
        last = pair[1]
        spans.append((pair[0], pair[1]))
    return tuple(spans)
