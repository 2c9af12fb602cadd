"""`longspan data info`: document lengths and what a context would cut, against plain counting."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.cli import main
from longspan.data.build import build
from longspan.data.lengths import contexts_for, cut_by, histogram


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 70), st.integers(1, 2**40)), min_size=1, max_size=20))
def test_the_histogram_counts_every_document_once(lengths: list[int]) -> None:
    bins = histogram(np.cumsum(lengths))
    for each in bins:
        inside = [n for n in lengths if each["from"] <= n <= each["to"]]
        assert (each["documents"], each["tokens"]) == (len(inside), sum(inside))
    assert sum(each["documents"] for each in bins) == len(lengths)
    assert bins[0]["documents"] > 0 < bins[-1]["documents"]


def test_what_a_context_cuts() -> None:
    found = cut_by(np.cumsum([10, 3, 25, 10, 7]), 10)
    # 25 = 10 + 10 + 5; 7 and 3 share a window, and 5 has one for itself.
    expected = {"context": 10, "cut_documents": 1, "cut_tokens": 25, "windows": 6}
    assert {key: found[key] for key in expected} == expected
    assert found["padding"] == pytest.approx(5 / 60)
    assert cut_by(np.zeros(0, dtype=np.int64), 10)["padding"] == 0
    assert contexts_for(5000, []) == [4096, 32768]
    assert contexts_for(5000, [7]) == [7]


def test_info_draws_and_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["x" * n for n in (2, 3, 5, 6, 30)]
    (tmp_path / "in.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    build([tmp_path / "in.jsonl"], tmp_path / "out", validation=0)
    capsys.readouterr()
    assert main(["data", "info", str(tmp_path / "out"), "--context", "16", "--context", "32"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["2-3", "tokens", "1", "documents", "5.9%", "of", "tokens", "█" * 14]
    assert lines[3].split()[-1] == "█" * 40
    assert "a context of 16 cuts 1 documents (20.0%, with 60.8% of the tokens)" in lines[-3]
    assert "a context of 32 cuts 0 documents" in lines[-2]
    assert main(["data", "info", str(tmp_path / "out"), "--json"]) == 0
    train = json.loads(capsys.readouterr().out)["splits"]["train"]
    assert [each["documents"] for each in train["histogram"]] == [1, 3, 0, 1]
    assert main(["data", "info", str(tmp_path / "out"), "--context", "0"]) == 2
    assert "--context must be at least 1, got 0" in capsys.readouterr().err
