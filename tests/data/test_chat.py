"""Conversations by a chat template: the text of transformers, a loss on answers, a sandbox."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longspan.cli import main
from longspan.data.build import build
from longspan.data.chat import ChatTemplate
from longspan.data.documents import Fields
from longspan.errors import UserError

pytest.importorskip("jinja2")
tokenizers = pytest.importorskip("tokenizers")

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}[A] {% generation %}"
    "{{ m.content }}{{ eos_token }}{% endgeneration %}\n{% else %}[{{ m.role }}] {{ m.content }}\n"
    "{% endif %}{% endfor %}"
)
TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi <b>"},
    {"role": "assistant", "content": "hello ü"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "ciao"},
]


def tokenizer_folder(folder: Path, template: Any = CHATML) -> Path:
    """A byte-level tokenizer with two special tokens and a chat template."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: n for n, letter in enumerate(alphabet)}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(["<|im_start|>", "<|im_end|>", "<s>", "</s>"])
    folder.mkdir(exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "</s>", "bos_token": "<s>"}
    if template is not None:
        config["chat_template"] = template
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def answers(text: str, spans: Any) -> list[str]:
    return [text[first:stop] for first, stop in spans]


def test_the_text_is_that_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for name, template in (("plain", CHATML), ("marked", MARKED)):
        folder = tokenizer_folder(tmp_path / name, template)
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
        text, _ = ChatTemplate(folder).render(TALK, "here")
        assert text == theirs.apply_chat_template(TALK, tokenize=False)


def test_answers_are_what_the_assistant_adds_or_the_template_marks(tmp_path: Path) -> None:
    text, spans = ChatTemplate(tokenizer_folder(tmp_path / "a")).render(TALK, "here")
    assert answers(text, spans) == ["hello ü<|im_end|>\n", "ciao<|im_end|>\n"]
    text, spans = ChatTemplate(tokenizer_folder(tmp_path / "b", MARKED)).render(TALK, "here")
    assert answers(text, spans) == ["hello ü</s>", "ciao</s>"]
    assert text.startswith("<s>[system] be brief\n[user] hi <b>\n[A] hello ü</s>[user] bye\n")


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["plain", "marked"])
def test_a_build_has_a_loss_on_answers_only(tmp_path: Path, template: str) -> None:
    folder = tokenizer_folder(tmp_path / "t", template)
    records = [{"messages": TALK}, {"messages": TALK[:3]}]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, records)))
    fields = Fields(chat="messages")
    index = build(
        [tmp_path / "in.jsonl"], tmp_path / "out", tokenizer=folder, fields=fields, validation=0
    )
    (shard,) = index.shards
    assert shard.loss is not None
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = np.fromfile(tmp_path / "out" / shard.file, "<u2").tolist()
    spans = np.fromfile(tmp_path / "out" / shard.loss.file, "<i8").reshape(-1, 2).tolist()
    found = [inner.decode(tokens[a:b], skip_special_tokens=False) for a, b in spans]
    ends = {CHATML: "<|im_end|>\n", MARKED: "</s>"}[template]
    assert found == [f"hello ü{ends}", f"ciao{ends}", f"hello ü{ends}"]
    # The template has ends of its own: none is added.
    whole = inner.decode(tokens, skip_special_tokens=False)
    assert whole == "".join(ChatTemplate(folder).render(x["messages"], "")[0] for x in records)


def test_a_template_of_its_own_file_or_by_name(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHATML}]
    folder = tokenizer_folder(tmp_path / "t", named)
    assert ChatTemplate(folder).source == CHATML
    (folder / "chat_template.jinja").write_text(MARKED)
    assert ChatTemplate(folder).source == MARKED


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "robot", "content": "x"}], 'message 1 has the role "robot": expected one of'),
        ([{"content": "x"}], "message 1 has the role null"),
        (["x"], "message 1 has the role str"),
        ([{"role": "user", "content": 3}], "message 1 has a content of type int"),
        ([{"role": "user", "content": "\ud800"}], "message 1 is not text"),
        ([{"role": "user", "content": "x"}], "no message is from the assistant"),
        ([], "expected a list of messages, got list"),
        ("x", "expected a list of messages, got str"),
    ],
)
def test_wrong_messages_are_refused_with_their_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], messages: Any, words: str
) -> None:
    folder = tokenizer_folder(tmp_path / "t")
    (tmp_path / "in.jsonl").write_text(json.dumps({"messages": messages}))
    arguments = ["data", "build", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out")]
    assert main([*arguments, "--tokenizer", str(folder), "--chat", "messages"]) == 2
    error = capsys.readouterr().err
    assert f"in.jsonl, line 1: {words}" in error
    assert "Traceback" not in error
    assert not (tmp_path / "out").exists()


HOSTILE = {
    "''.__class__.__mro__[1].__subclasses__()": "unsafe",
    "messages.append(1)": "unsafe|not safely",
    "'x' * 999999999": "supported for small numbers only",
    "9 ** 9 ** 9": "small exponents",
    "'%9999999999d' % 1": "% of text",
    "range(10 ** 6)": "too big|small",
    "raise_exception('only users')": "only users",
    "messages[0].content.nothing.more": "no attribute",
    "1 / 0": "division by zero",
    "undefined_function()": "is undefined",
}


@pytest.mark.parametrize("expression", HOSTILE)
def test_a_hostile_template_ends_in_one_error(tmp_path: Path, expression: str) -> None:
    folder = tokenizer_folder(tmp_path / "t", f"{{{{ {expression} }}}}")
    with pytest.raises(UserError, match=f"here: the chat template of .*({HOSTILE[expression]})"):
        ChatTemplate(folder).render(TALK, "here")


def test_what_a_template_makes_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longspan.data.chat.MAX_CHARACTERS", 1000)
    folder = tokenizer_folder(tmp_path / "t", "{% for n in range(99999) %}text{% endfor %}")
    with pytest.raises(UserError, match="fails: more than 1,000 characters"):
        ChatTemplate(folder).render(TALK, "here")


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a'.ljust(4000000000) }}",
        "{{ '{:>4000000000}'.format('a') }}",
        "{% set x = namespace(s='ab' | center(9999)) %}{% for n in range(30) %}"
        "{% set x.s = x.s ~ x.s %}{% endfor %}",
    ],
)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the limit is that of Linux")
def test_the_memory_of_a_template_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.setattr("longspan.data.chat.MAX_MEMORY", 1 << 28)
    before = resource.getrlimit(resource.RLIMIT_AS)
    folder = tokenizer_folder(tmp_path / "t", template)
    with pytest.raises(UserError, match="fails: it needs more than"):
        ChatTemplate(folder).render(TALK, "here")
    assert resource.getrlimit(resource.RLIMIT_AS) == before


@pytest.mark.parametrize(
    "template",
    [
        "{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}",
        "{% generation %}a{% endgeneration %}{% filter upper %}{% generation %}b{% endgeneration %}"
        "{% endfilter %}",
    ],
)
def test_the_marks_of_answers_never_become_text(tmp_path: Path, template: str) -> None:
    folder = tokenizer_folder(tmp_path / "t", template)
    with pytest.raises(UserError, match=r"here: .* within another, or in a filter"):
        ChatTemplate(folder).render(TALK, "here")


def test_the_end_of_answers_is_known_or_refused(tmp_path: Path) -> None:
    """Undefined it would be no text, and a model would not learn to stop."""
    folder = tokenizer_folder(tmp_path / "t", MARKED)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": MARKED}))
    with pytest.raises(UserError, match=r"ends messages with eos_token, but .* does not say"):
        ChatTemplate(folder)
    names = {"eos_token": {"content": "</s>"}, "bos_token": "<s>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(names))
    text, spans = ChatTemplate(folder).render(TALK, "here")
    assert text.startswith("<s>")
    assert answers(text, spans) == ["hello ü</s>", "ciao</s>"]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for %}", "is not valid: .*line 1"),
        (None, "has no chat template: expected chat_template in tokenizer_config.json"),
        ([{"name": "rag", "template": "x"}], "has no chat template"),
    ],
)
def test_a_folder_without_a_valid_template_is_refused(
    tmp_path: Path, template: Any, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        ChatTemplate(tokenizer_folder(tmp_path / "t", template))


def test_a_template_whose_answers_are_unknown_is_refused(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "t", "{{ messages | length }}{{ messages[-1].content }}")
    with pytest.raises(UserError, match=r"does not append message 3 .* mark it by {% generation"):
        ChatTemplate(folder).render(TALK, "here")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--chat", "m"], "--chat needs a tokenizer folder"),
        (["--chat", "m", "--prompt", "q", "--answer", "a"], "--chat takes the place of"),
    ],
)
def test_wrong_options_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    (tmp_path / "in.jsonl").write_text("{}")
    arguments = ["data", "build", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out")]
    assert main([*arguments, *options]) == 2
    assert words in capsys.readouterr().err
