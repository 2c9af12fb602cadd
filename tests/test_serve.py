"""`longspan serve`: what a client of OpenAI's protocol gets, and what is refused."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from longspan.data.tokenizer import ByteTokenizer
from longspan.device import resolve
from longspan.generate import TextGenerator
from longspan.hf_generation import GenerationSettings
from longspan.models import build_decoder
from longspan.runfile import load_run
from longspan.serve import MAX_BYTES, Server
from tests.steps import CPU

PROMPTS = ["import os", "def "]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    run = resolve(load_run(None, ["model.hidden=32", "data.context=64", "train.device=cpu"]), CPU)
    model = build_decoder(run, CPU)
    generator = TextGenerator("tiny", run, model, ByteTokenizer(), GenerationSettings())
    with Server(generator) as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def call(
    server: Server, method: str, path: str, body: object = None, **headers: str
) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    content = body if isinstance(body, bytes) else json.dumps(body)
    given = {"Authorization": f"Bearer {server.token}", **headers}
    connection.request(method, path, body=None if body is None else content, headers=given)
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def texts_of(server: Server, count: int, **options: Any) -> list[str]:
    generator = server.generator
    found = generator.complete_batch(PROMPTS, generator.sampling(count, **options))
    return [completion.text for completion in found]


def test_completions_are_those_of_the_generator(server: Server) -> None:
    request = {"model": "tiny", "prompt": PROMPTS, "max_tokens": 20, "seed": 5, "temperature": 2}
    status, found = call(server, "POST", "/v1/completions", request)
    assert status == 200
    texts = [choice["text"] for choice in found["choices"]]
    assert texts == texts_of(server, 20, seed=5, temperature=2)
    assert found["usage"] == {"prompt_tokens": 13, "completion_tokens": 40, "total_tokens": 53}
    assert {choice["finish_reason"] for choice in found["choices"]} == {"length"}


def test_the_client_of_openai_gets_and_streams_completions(server: Server) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=server.url, api_key=server.token, max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        expected = texts_of(server, 20, temperature=0)[0]
        options = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 20, "temperature": 0}
        found = client.completions.create(**options)
        assert found.choices[0].text == expected
        events = list(client.completions.create(**options, stream=True))
        assert len(events) > 2
        assert "".join(event.choices[0].text for event in events) == expected
        assert [event.choices[0].finish_reason for event in events][-2:] == [None, "length"]
        with pytest.raises(openai.BadRequestError, match="n = 3 is not supported"):
            client.completions.create(**options, n=3)
    with (
        openai.OpenAI(base_url=server.url, api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError, match="send the token"),
    ):
        client.models.list()


def test_a_stream_without_the_client_of_openai(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    request = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 5, "stream": True}
    headers = {"Authorization": f"Bearer {server.token}"}
    body = json.dumps(request | {"temperature": 0})
    connection.request("POST", "/v1/completions", body, headers)
    lines = connection.getresponse().read().decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    texts = [event["choices"][0]["text"] for event in events]
    assert "".join(texts) == texts_of(server, 5, temperature=0)[0]
    assert len({event["id"] for event in events}) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": None}, "prompt must be a text or a list of them"),
        ({"prompt": [1, 2]}, "prompt must be a text or a list of at most 64 of them"),
        ({"prompt": [""]}, "prompt must be a text"),
        ({"prompt": ["a"] * 65}, "at most 64 of them"),
        ({"prompt": ["a", "b"], "stream": True}, "true needs one prompt"),
        ({"model": "other"}, "model must be 'tiny', got 'other'"),
        ({"max_tokens": "1"}, "max_tokens must be a number, got '1'"),
        ({"max_tokens": -1}, "expected max_tokens >= 0, got -1"),
        ({"max_tokens": 65}, "max_tokens must be at most the context of 64 tokens, got 65"),
        ({"temperature": True}, "temperature must be a number, got True"),
        ({"top_p": 2}, "expected top_p in (0, 1], got 2"),
        ({"stop": [1]}, "stop must be a text or a list"),
        ({"logprobs": 3}, "logprobs = 3 is not supported: leave it out"),
        ({"tools": []}, "tools is not supported: leave it out"),
    ],
    ids=str,
)
def test_a_wrong_request_gets_one_clear_error(
    server: Server, change: dict[str, Any], message: str
) -> None:
    request = {"model": "tiny", "prompt": "a", **change}
    status, found = call(server, "POST", "/v1/completions", request)
    assert status == 400
    assert message in found["error"]["message"]


def test_who_is_refused(server: Server) -> None:
    body = {"model": "tiny", "prompt": "a", "max_tokens": 1}
    for headers in ({"Authorization": ""}, {"Authorization": "Bearer x"}):
        assert call(server, "POST", "/v1/completions", body, **headers)[0] == 401
        assert call(server, "GET", "/v1/models", **headers)[0] == 401
    assert call(server, "GET", "/v1/models", Host="evil.example")[0] == 403
    assert call(server, "GET", "/v1/nothing")[0] == 404
    assert call(server, "GET", "/v1/completions")[0] == 404
    for wrong in (b"", b"{", b"[]", b'{"a": 1, "a": 2}', b"\xff", b"[" * 10_000):
        assert call(server, "POST", "/v1/completions", wrong)[0] == 400
    status, found = call(
        server, "POST", "/v1/completions", body, **{"Content-Length": str(MAX_BYTES + 1)}
    )
    assert (status, "more than" in found["error"]["message"]) == (400, True)
    assert call(server, "POST", "/v1/completions", body)[0] == 200
