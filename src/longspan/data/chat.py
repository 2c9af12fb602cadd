"""Conversations as text: the chat template of a tokenizer folder, in Jinja's sandbox.

A template comes with a tokenizer that others made, so it is untrusted: it sees the messages and the
names of special tokens only, can change nothing, and its memory and what it makes are bounded.

Which text is an answer of the assistant is what a template marks by {% generation %}. Without that,
it is what a message of the assistant adds to the text of the messages before it.
"""

from __future__ import annotations

import json
import os
import resource
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from longspan.data.documents import Span
from longspan.data.tokenizer import MAX_BYTES, TOKENIZER_CONFIG
from longspan.errors import UserError
from longspan.files import read_bounded, read_json_object

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_CHARACTERS = 1 << 26
"""Of the text of a conversation."""
MAX_MEMORY = 1 << 31
"""Bytes that a template may take while it makes that."""
TEMPLATE_FILE = "chat_template.jinja"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


class ChatTemplate:
    """Renders conversations, and says which of the text the assistant has written."""

    def __init__(self, folder: Path) -> None:
        """`folder`: of a tokenizer, with the template in its tokenizer_config.json or beside it."""
        self.source, tokens = _read_template(folder)
        self._name = f"the chat template of {folder}"
        environment, errors = _environment()
        self._errors = errors
        self._nonce = secrets.token_hex(16)  # no message can contain it
        self._marks = f"\x02{self._nonce}", f"\x03{self._nonce}"
        environment.globals["_generation"] = self._marks
        try:
            self._template = environment.from_string(self.source)
        except errors as error:
            raise UserError(f"{self._name} is not valid: {_text(error)}") from error
        self._has_marks = environment.marks_found
        self._tokens = tokens
        if "eos_token" not in tokens and "eos_token" in environment.undeclared(self.source):
            raise UserError(
                f"{self._name} ends messages with eos_token, but {folder / TOKENIZER_CONFIG} does "
                "not say which token that is: add it, or the model would not learn to stop"
            )

    def render(self, messages: Any, where: str) -> tuple[str, tuple[Span, ...]]:
        """The text of a conversation, and the spans of it that are answers."""
        _check(messages, where)
        if self._has_marks:
            return self._cut_marks(self._text(messages, where), where)
        text = self._text(messages, where)
        spans: list[Span] = []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._text(messages[:number], where, asks=True)
                after = self._text(messages[: number + 1], where)
                if not (after.startswith(before) and text.startswith(after)):
                    raise UserError(
                        f"{where}: {self._name} does not append message {number + 1} to the text "
                        "of those before it, so that it is not known what the answer is: mark it "
                        "by {% generation %} … {% endgeneration %} in the template"
                    )
                spans.append((len(before), len(after)))
        return text, tuple(spans)

    def _text(self, messages: Sequence[Any], where: str, *, asks: bool = False) -> str:
        """Rendered text; `asks`: with what comes before an answer."""
        parts: list[str] = []
        length = 0
        values = {**self._tokens, "messages": messages, "add_generation_prompt": asks}
        try:
            with _bounded_memory(MAX_MEMORY):
                for part in self._template.generate(values):
                    parts.append(part)
                    length += len(part)
                    if length > MAX_CHARACTERS:
                        raise MemoryError(f"more than {MAX_CHARACTERS:,} characters")
        except MemoryError as error:
            reason = str(error) or f"it needs more than {MAX_MEMORY >> 30} GiB of memory"
            raise UserError(f"{where}: {self._name} fails: {reason}") from error
        except self._errors as error:
            raise UserError(f"{where}: {self._name} fails: {_text(error)}") from error
        return "".join(parts)

    def _cut_marks(self, marked: str, where: str) -> tuple[str, tuple[Span, ...]]:
        begin, end = self._marks
        first, *others = marked.split(begin)
        text, spans = first, []
        for part in others:
            answer, _, rest = part.partition(end)
            spans.append((len(text), len(text) + len(answer)))
            text += answer + rest
        if self._nonce[:8] in text.lower():  # part of a mark, which a filter has cut or changed
            raise UserError(
                f"{where}: {self._name} has {{% generation %}} within another, or in a filter: "
                "mark each answer by itself"
            )
        return text, tuple(span for span in spans if span[0] < span[1])


def _read_template(folder: Path) -> tuple[str, dict[str, str]]:
    """The template of a tokenizer folder, and the texts of its special tokens."""
    config: dict[str, Any] = {}
    if os.path.lexists(folder / TOKENIZER_CONFIG):
        config = read_json_object(folder / TOKENIZER_CONFIG, MAX_BYTES)
    found = config.get("chat_template")
    if os.path.lexists(folder / TEMPLATE_FILE):
        found = read_bounded(folder / TEMPLATE_FILE, MAX_BYTES).decode("utf-8", "replace")
    if isinstance(found, list):  # several, by name
        named = {x.get("name"): x.get("template") for x in found if isinstance(x, dict)}
        found = named.get("default")
    if not isinstance(found, str):
        raise UserError(
            f"{folder} has no chat template: expected chat_template in {TOKENIZER_CONFIG}, or "
            f"{TEMPLATE_FILE}"
        )
    names: dict[str, Any] = {}  # which older folders have apart
    if os.path.lexists(folder / SPECIAL_TOKENS_MAP):
        names = read_json_object(folder / SPECIAL_TOKENS_MAP, MAX_BYTES)
    tokens = {}
    for name in SPECIAL_TOKENS:
        token = config.get(name) or names.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            tokens[name] = token
    return found, tokens


def _check(messages: Any, where: str) -> None:
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{where}: expected a list of messages, got {type(messages).__name__}")
    for number, message in enumerate(messages, 1):
        here = f"{where}: message {number}"
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ROLES:
            given = json.dumps(role)[:100] if isinstance(message, dict) else type(message).__name__
            raise UserError(f"{here} has the role {given}: expected one of {', '.join(ROLES)}")
        content = message.get("content")
        if not isinstance(content, str):
            kind = type(content).__name__
            raise UserError(f"{here} has a content of type {kind}: only text is supported")
        try:
            content.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{here} is not text: {error}") from error
    if not any(message["role"] == "assistant" for message in messages):
        raise UserError(f"{where}: no message is from the assistant, so that none has a loss")


@contextmanager
def _bounded_memory(limit: int) -> Iterator[None]:
    """Raise MemoryError where more than so many bytes are allocated, on Linux."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # another system, which does not enforce this limit
        yield
        return
    most = pages * resource.getpagesize() + limit
    if before[0] != resource.RLIM_INFINITY:
        most = min(most, before[0])
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _text(error: Exception) -> str:
    line = getattr(error, "lineno", None)
    place = f" (line {line})" if line else ""
    return f"{error}{place}" or type(error).__name__


def _environment() -> tuple[Any, tuple[type[Exception], ...]]:
    """Jinja's sandbox with what templates of Hugging Face use, and the errors that it raises."""
    try:
        from jinja2 import TemplateError, meta, nodes
        from jinja2.exceptions import SecurityError
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise UserError("a chat template needs Jinja: pip install 'longspan[chat]'") from error

    class Environment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**", "%"})
        marks_found = False

        def undeclared(self, source: str) -> set[str]:
            """The names that a template uses and does not set."""
            return meta.find_undeclared_variables(self.parse(source))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            """Numbers only, and small ones: a few characters can ask for all memory."""
            limit = 1 << 32
            if operator == "%" and isinstance(left, str):
                raise SecurityError("% of text is not supported in a chat template")
            if not all(isinstance(x, int | float) and abs(x) < limit for x in (left, right)):
                raise SecurityError(f"{operator} is supported for small numbers only")
            if operator == "**" and abs(right) > 8:
                raise SecurityError("** is supported for small exponents only")
            return super().call_binop(context, operator, left, right)

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 (as the base class has it)

        def parse(self, parser: Any) -> Any:
            self.environment.marks_found = True  # type: ignore[attr-defined]
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_marked")
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _marked(self, caller: Callable[[], str]) -> str:
            marks: Any = self.environment.globals["_generation"]
            return f"{marks[0]}{caller()}{marks[1]}"

    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )

    def fail(message: str) -> None:
        raise TemplateError(str(message))

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = fail
    del environment.globals["lipsum"]
    # No strftime_now: templates have a date of their own then, and a build always the same bytes.
    # A template is a program: what it does wrong are errors of Python too.
    plain = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
    return environment, (TemplateError, *plain)
