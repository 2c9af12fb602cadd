"""`longspan serve`: a trained model behind the OpenAI completions protocol, on this machine alone.

The server listens on 127.0.0.1. Every request must carry the token as `Authorization: Bearer` and
name this machine as its host. One request generates at a time; a request may hold several prompts.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from itertools import chain
from typing import Any, TypeVar

from longspan.errors import UserError
from longspan.files import parse_json_object
from longspan.generate import TextGenerator
from longspan.loopback_server import HOST, LoopbackServer
from longspan.models.generation import Sampling, encode_prompt

T = TypeVar("T")
MAX_BYTES = 1 << 24
"""Size of a request."""
MAX_PROMPTS = 64
MAX_STOPS = 16
MAX_TOKENS = 16
"""Tokens that are generated unless `max_tokens` is given, as in OpenAI's API."""
MAX_WAITING = 32
"""Requests at once; all but one wait."""

NEUTRAL: dict[str, Any] = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "logprobs": None,
    "suffix": None,
    "stream_options": None,
}
"""Parameters that are not supported, with the value that has no effect."""
IGNORED = ("user", "metadata", "store")


class BadRequest(Exception):
    """A request that the client must change; `parameter` is what is wrong."""

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


@dataclass(frozen=True)
class Request:
    """A request for completions."""

    prompts: list[str]
    sampling: Sampling
    streams: bool


class Server(LoopbackServer):
    """Serves one model."""

    def __init__(self, generator: TextGenerator, port: int = 0, token: str | None = None) -> None:
        self.generator = generator
        self.generating = threading.Lock()
        self.waiting = threading.BoundedSemaphore(MAX_WAITING)
        self.started = int(time.time())
        super().__init__(_Handler, port, token)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    timeout = 60  # of a client that sends nothing

    def do_GET(self) -> None:
        self._answer({"/v1/models": self._models})

    def do_POST(self) -> None:
        self._answer({"/v1/completions": self._completions})

    def _answer(self, paths: dict[str, Callable[[], None]]) -> None:
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if not self.server.is_host(self.headers.get("Host", "")):
            self._refuse(HTTPStatus.FORBIDDEN, "this server is for 127.0.0.1 alone")
        elif not self.server.is_token(given):
            self._refuse(HTTPStatus.UNAUTHORIZED, "send the token: Authorization: Bearer TOKEN")
        elif (handle := paths.get(self.path)) is None:
            self._refuse(HTTPStatus.NOT_FOUND, f"there is no {self.command} {self.path}")
        else:
            try:
                handle()
            except BadRequest as error:
                self._refuse(HTTPStatus.BAD_REQUEST, str(error), error.parameter)

    def _models(self) -> None:
        name, created = self.server.generator.name, self.server.started
        model = {"id": name, "object": "model", "created": created, "owned_by": "longspan"}
        self._send({"object": "list", "data": [model]})

    def _completions(self) -> None:
        request = parse_request(self._body(), self.server.generator)
        if not self.server.waiting.acquire(blocking=False):
            self._refuse(HTTPStatus.TOO_MANY_REQUESTS, "too many requests are waiting")
            return
        try:
            with self.server.generating:
                (self._stream if request.streams else self._complete)(request)
        finally:
            self.server.waiting.release()

    def _complete(self, request: Request) -> None:
        generator = self.server.generator
        found = _checked(lambda: generator.complete_batch(request.prompts, request.sampling))
        tokens = [len(encode_prompt(generator.tokenizer, x)) for x in request.prompts]
        usage = {"prompt_tokens": sum(tokens), "completion_tokens": sum(x.tokens for x in found)}
        usage["total_tokens"] = sum(usage.values())
        choices = [_choice(i, x.text, x.finish_reason) for i, x in enumerate(found)]
        self._send(self._result(choices) | {"usage": usage})

    def _stream(self, request: Request) -> None:
        """Server-sent events: one for each piece of text, and [DONE]."""
        pieces = self.server.generator.complete(request.prompts[0], request.sampling)
        _checked(lambda: next(pieces))  # the prompt, which the client has
        first = _checked(lambda: next(pieces))
        self._head(HTTPStatus.OK, "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        result = self._result([])  # all have the same id
        for piece in chain([first], pieces):
            if piece.text or piece.finish_reason:
                result["choices"] = [_choice(0, piece.text, piece.finish_reason)]
                self.wfile.write(f"data: {json.dumps(result)}\n\n".encode())
                self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")

    def _result(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.server.generator.name,
            "choices": choices,
        }

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal()):
            raise BadRequest("the request needs a Content-Length")
        if int(length) > MAX_BYTES:
            raise BadRequest(f"the request has more than {MAX_BYTES:,} bytes")
        return self.rfile.read(int(length))

    def _send(self, value: object, status: HTTPStatus = HTTPStatus.OK) -> None:
        body = json.dumps(value).encode()
        self._head(status, "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _head(self, status: HTTPStatus, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")

    def _refuse(self, status: HTTPStatus, message: str, parameter: str | None = None) -> None:
        self.close_connection = True  # the body may be unread
        error = {"message": message, "param": parameter, "code": None}
        self._send({"error": error | {"type": "invalid_request_error"}}, status)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


def parse_request(content: bytes, generator: TextGenerator) -> Request:
    """Check a request and fill in its defaults; what is not supported is refused by name."""
    try:
        given = parse_json_object(content)
    except ValueError as error:
        raise BadRequest(f"the body is not a JSON object: {error}") from error
    for name, neutral in NEUTRAL.items():
        if (value := given.pop(name, None)) is not None and value != neutral:
            raise BadRequest(f"{name} = {value!r} is not supported: leave it out", name)
    for name in IGNORED:
        given.pop(name, None)
    model = given.pop("model", None)
    if model != generator.name:
        raise BadRequest(f"model must be {generator.name!r}, got {model!r}", "model")
    prompts, stops = _texts(given, "prompt", MAX_PROMPTS), _texts(given, "stop", MAX_STOPS)
    if not prompts:
        raise BadRequest("prompt must be a text or a list of them", "prompt")
    streams = given.pop("stream", None) or False
    if not isinstance(streams, bool) or (streams and len(prompts) > 1):
        raise BadRequest("stream must be true or false; true needs one prompt", "stream")
    kinds = {"temperature": float, "top_p": float, "top_k": int, "repetition_penalty": float}
    options: dict[str, Any] = {
        name: _number(given, name, kind) for name, kind in (kinds | {"seed": int}).items()
    }
    options["seed"] = secrets.randbits(63) if options["seed"] is None else options["seed"]
    count = _number(given, "max_tokens", int)
    count = MAX_TOKENS if count is None else count
    if given:
        raise BadRequest(f"{next(iter(given))} is not supported: leave it out", next(iter(given)))
    if count > generator.run.data.context:
        limit = f"the context of {generator.run.data.context:,} tokens"
        raise BadRequest(f"max_tokens must be at most {limit}, got {count}", "max_tokens")
    sampling = _checked(lambda: generator.sampling(count, stop=stops, **options))
    return Request(prompts, sampling, streams)


def _texts(given: dict[str, Any], name: str, limit: int) -> list[str]:
    """A text or a list of at most `limit` of them, none of them empty."""
    value = given.pop(name, None)
    found = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) and text for text in found) or len(found) > limit:
        raise BadRequest(f"{name} must be a text or a list of at most {limit} of them", name)
    return found


def _number(given: dict[str, Any], name: str, kind: type[int] | type[float]) -> Any:
    value = given.pop(name, None)
    allowed = (int,) if kind is int else (int, float)
    if value is not None and type(value) not in allowed:
        raise BadRequest(f"{name} must be a number, got {value!r}", name)
    return value


def _checked(call: Callable[[], T]) -> T:
    """Call, and make the user's errors the client's, with the names of parameters."""
    try:
        return call()
    except UserError as error:
        text = str(error).replace("--tokens", "max_tokens")
        text = re.sub("--([a-z-]+)", lambda option: option[1].replace("-", "_"), text)
        raise BadRequest(text) from error


def _choice(index: int, text: str, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
