"""The page: its HTML, and how Chromium shows it."""

from __future__ import annotations

import json
import re
import sys
import threading
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from longspan.cli import main
from longspan.errors import UserError
from longspan.reporting import Live, page_data, read_input, read_run, render
from longspan.reporting.html import script_json, tag
from longspan.reporting.page import bokeh_scripts
from longspan.reporting.sections import attention
from longspan.runfile import dump_run, load_run
from tests.reporting.browser import needs_chromium, show
from tests.reporting.runs import ONE_START, history, metrics, write_lines, write_run

BREAKOUTS = (
    "</script><script>document.documentElement.dataset.ran=1</script>",
    '<img src=x onerror="document.documentElement.dataset.ran=1">',
    "<img src='http://example.invalid/pixel.png'>",
    '\'"><svg onload="document.documentElement.dataset.ran=1">',
    "]]>--><!--<script>document.documentElement.dataset.ran=1//",
    "javascript:document.documentElement.dataset.ran=1",
    "\u2028document.documentElement.dataset.ran=1\u2029\x00\x1b[31m\u202e${alert(1)}{{7*7}}",
)
"""Texts that would run or load something if a page held them as they are."""


def hostile_run(folder: Path) -> Path:
    """A run whose texts are all hostile: name, metrics, causes, configuration, profile."""
    text = " ".join(BREAKOUTS)
    lines = [{**line, f"x{BREAKOUTS[0]}/{text}": 1.0 + i} for i, line in enumerate(metrics(60))]
    lines.append({"step": 60, "rolled_back": text})
    events = history(
        (1000.0, "start", 0, {"lost_steps": 0, "cause": None, "ranks": 1, text: text}),
        (1010.0, text, 5, {}),
        (1020.0, "failure", 20, {"cause": text}),
    )
    write_run(folder, lines, events)
    with (folder / "run.toml").open("a") as file:
        file.write(f"\n[{json.dumps(BREAKOUTS[0])}]\nx = {json.dumps(BREAKOUTS[1])}\n")
    (folder / "env.json").write_text(json.dumps({text: text, "command": [text]}))
    (folder / "profile").mkdir()
    operator = {"name": text, "calls": text, "self_s": text, "bytes": text}
    steps = [{"compute_s": 1.0, "idle_s": "x"}]
    ranks = [{"rank": text, "steps": steps, "by_time": [operator], "by_memory": [3]}]
    summary = {"findings": [text], "ranks": ranks}
    (folder / "profile" / "summary.json").write_text(json.dumps(summary))
    return folder


def hostile_results(folder: Path) -> list[Path]:
    text = " ".join(BREAKOUTS)
    rows = [{text: text, "tokens": n, "both_ms": 1.0} for n in (1, 2)]
    contents = {
        "plan": {
            "gpus": text,
            "stages": [{text: 1, "peak": {text: 1}, "fragmentation": text}],
            "parameters": text,
            "derived": {text: text},
            "device_bytes": 2,
            "device_title": text,
            "forecast": {"parts_s": {text: 1.0}, "device": text, "tokens": text, "usd": text},
            "scaling": [{"gpus": n, "tokens_per_s": n, text: text} for n in (1, 2)],
            "search": {"ranked": [{"layout": {"shard": text}, "train": text}], "why": [text]},
        },
        "drill": {"outcomes": [{"fault": text}], "passed": text, "same_bytes": text},
        "bench": {"machine": text, "setting": {text: text}, text: rows},
    }
    for name, content in contents.items():
        (folder / f"{name}<b>.json").write_text(json.dumps(content))
    return [folder / f"{name}<b>.json" for name in contents]


class Elements(HTMLParser):
    """The elements of a page and their attributes, and the text outside scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_text_is_escaped_and_markup_is_not() -> None:
    inner = tag("b", "<i>&\x00", class_='"x"', title=None, hidden=True)
    assert tag("p", inner, None, ["a", 3]) == (
        '<p><b class="&quot;x&quot;" hidden>&lt;i&gt;&amp;�</b>a3</p>'
    )


@pytest.mark.parametrize("text", BREAKOUTS)
def test_json_in_a_script_stays_there(text: str) -> None:
    found = script_json({"x": text})
    assert json.loads(found) == {"x": text}
    assert not re.search("[<>&\u2028\u2029]", found)


def test_hostile_texts_make_no_element_and_no_attribute(tmp_path: Path) -> None:
    run = hostile_run(tmp_path / BREAKOUTS[1].replace("/", "∕"))
    inputs = [read_input(path) for path in [run, *hostile_results(tmp_path)]]
    page = Elements(render(inputs))
    names = {name for name, _ in page.found}
    assert not names & {"img", "iframe", "object", "link", "a href", "base", "form"}
    assert sum(name == "script" for name, _ in page.found) == 5  # data, Bokeh's three, ours
    assert sum(name == "svg" for name, _ in page.found) <= 1  # the attention pattern
    for _, attributes in page.found:
        assert not [key for key in attributes if key.startswith("on")]
        assert (attributes.get("href") or "#").startswith("#")
    assert "onerror=" in page.text  # as text


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_deep_and_huge_values_end_no_report(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    deep = "[" * 900 + "]" * 900
    start = '{"time": 1, "event": "start", "step": 0, "ranks": 16777216'
    (folder / "history.jsonl").write_text(f'{start}}}\n{start}, "x": {deep}}}\n')
    (folder / "run.toml").write_text(f"[{'.'.join('a' * 3_000)}]\nx = 1\n")
    numbers = '"loss": 1e308, "tokens": -1e308, "tokens_per_s": 5e-324, "mfu": 1e308'
    (folder / "metrics.jsonl").write_text(f'{{"step": 1, {numbers}}}\n{{"step": 2, {numbers}}}\n')
    plan = {"gpus": 1, "parameters": 1, "derived": {}}
    for number, stages in enumerate([5, [{"on_device": 10**400}]]):
        (tmp_path / f"plan{number}.json").write_text(json.dumps({**plan, "stages": stages}))
    run = read_run(folder)
    assert len(run.events) == 1
    assert any("nested deeper than 32" in problem for problem in run.problems)
    plans = [read_input(tmp_path / f"plan{number}.json") for number in range(2)]
    assert "1e+308" not in render([run, *plans])


def test_a_run_file_with_an_auto_layout_is_reported(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", metrics(3))
    run_file = folder / "run.toml"
    text = re.sub(r"\[layout\].*?\n\n", "", run_file.read_text(), flags=re.S)
    run_file.write_text(f'layout = "auto"\n\n{text}')
    assert "layout = &quot;auto&quot;, which a run replaces" in render([read_input(folder)])


def test_the_page_of_a_plan_is_bounded(tmp_path: Path) -> None:
    """Each stage has parts of its own, so that the table would have a million cells."""
    stages = [{"peak": {f"part {i} {j}": 1 << 30 for j in range(4)}} for i in range(500)]
    plan = {"gpus": 1, "parameters": 1, "derived": {}, "stages": stages}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    page = render([read_input(tmp_path / "plan.json")])
    assert "The first 64 of 500 pipeline ranks." in page
    assert page.count("<td") < 5_000


def test_the_policy_allows_these_scripts_and_no_network(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run"))
    policy, live = (
        next(
            attributes["content"] or ""
            for name, attributes in Elements(page).found
            if name == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
        )
        for page in (render([run]), render([run], live=Live("events", "data")))
    )
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy
    assert "unsafe-inline" not in policy.split("style-src")[0]
    assert "connect-src" not in policy
    assert "connect-src 'self'" in live


def test_the_command_writes_a_page_and_prints_the_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run")
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out.startswith(f"{run / 'report.html'}: 1.")
    assert (run / "report.html").read_text().startswith("<!doctype html>")
    assert main(["report", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["runs"] == [{"name": "run", "state": "finished", "why": ""}]
    assert found["axes"] == ["step", "tokens", "time"]
    (loss, *_) = found["charts"]
    assert [series["label"] for series in loss["series"]] == ["training", "validation", "baseline"]
    for wrong, text in {
        (str(run), str(run)): "is given twice",
        (str(run), "-o", "page.txt"): "must name a file that ends in .html",
        (str(run), "-o", str(tmp_path / "no" / "x.html")): "cannot write",
        (str(tmp_path),): "is not a run folder",
    }.items():
        assert main(["report", *wrong]) == 2
        assert text in capsys.readouterr().err


def test_without_bokeh_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bokeh.resources", None)
    with pytest.raises(UserError, match=r"pip install 'longspan\[report\]'"):
        bokeh_scripts.__wrapped__()


def test_the_layout_shows_what_each_rank_holds(tmp_path: Path) -> None:
    start = (1000.0, "start", 0, {"lost_steps": 0, "cause": None, "ranks": 8})
    axes = ["layout.replicate=2", "layout.shard=1", "layout.sequence=2", "layout.pipeline=2"]
    batch = ["train.global_batch=4", "train.micro_batch=1"]
    events = history(start)
    run = read_run(write_run(tmp_path / "run", (), events, [*axes, *batch], world=8))
    text = Elements(page_data([run])["sections"]["layout"]["html"]).text
    # Pipeline ranks are farthest apart, those of one sequence are neighbours.
    assert re.findall(r"pipeline rank \d: layers \d+|replica \d|rank \d+", text)[:5] == [
        "pipeline rank 0: layers 0",
        "replica 0",
        "rank 0",
        "rank 1",
        "replica 1",
    ]
    assert "rank 7sequence 2/2" in text
    assert "embedding" in text
    assert "head" in text


def test_the_picture_of_a_pattern_is_that_of_its_mask() -> None:
    from longspan.attention import Dilated, picture
    from longspan.attention.pattern import reach
    from longspan.config import Attention
    from longspan.reporting.pictures import pattern_picture, reaches

    dilated = Attention(kind="dilated", segment_lengths=(8, 64), dilation_rates=(1, 1))
    found = pattern_picture(dilated, 64, 2)
    pattern = Dilated((8, 64), (1, 1))
    drawn = [["·"] * 64 for _ in range(64)]
    for x, y, width, shade in re.findall(
        r'<rect x="(\d+)" y="(\d+)" width="(\d+)" height="1" class="shade(\d)"', found.svg
    ):
        for column in range(int(x), int(x) + int(width)):
            drawn[int(y)][column] = "█" if shade == "4" else "▒"
    assert "\n".join("".join(row) for row in drawn) == picture(pattern, 64)
    assert reaches(dilated, 64, 2, 3) == [reach([pattern] * n, 64, 2) for n in (1, 2, 3)]


def test_every_distinct_pattern_of_the_layers_is_drawn_once(tmp_path: Path) -> None:
    window, layers = '{kind="window",window=9,repeat=2}', "model.layers=7"
    patterns = f'[{window},{{kind="dense"}},{window.replace("2", "1")}]'
    run = load_run(None, [f"attention.layers={patterns}", layers])
    (tmp_path / "run.toml").write_text(dump_run(run))
    found = attention(read_run(tmp_path))
    assert found is not None
    assert found.count("<svg") == 2
    for text in ("In 3 of every 4 layers.", "In 1 of every 4 layers.", "Window attention over"):
        assert text in found
    assert found.count("Reach: tokens back") == 1
    assert "Over 7 layers: 4,096 of 4,096 tokens." in found


@needs_chromium
def test_a_hostile_page_is_drawn_runs_nothing_and_loads_nothing(tmp_path: Path) -> None:
    run = hostile_run(tmp_path / BREAKOUTS[1].replace("/", "∕"))
    write_lines(run / "metrics.jsonl", [*metrics(3_000), {"step": 1, BREAKOUTS[3]: 1.0}])
    page = tmp_path / "page.html"
    inputs = [read_input(path) for path in [run, *hostile_results(tmp_path)]]
    page.write_text(render(inputs))
    shown = show(page, tmp_path, height=8000)
    assert shown.attribute("data-ran") == []
    assert shown.errors == []
    assert shown.requests == []
    assert len(shown.attribute("data-drawn")) == len(page_data(inputs)["charts"]) > 5
    assert shown.pixels("#2563a8") > 1_000  # the first curves
    assert shown.pixels("#fbfbfa") > 100_000  # the page, in light
    assert "the line is the mean of a bin" in shown.dom


@needs_chromium
def test_a_request_and_an_error_of_a_page_would_be_seen(tmp_path: Path) -> None:
    image = "<img src='http://example.invalid/pixel.png'>"
    (tmp_path / "page.html").write_text(f"{image}<script>undefined_name()</script>")
    shown = show(tmp_path / "page.html", tmp_path, height=300, until="true")
    assert shown.requests == ["http://example.invalid/pixel.png"]
    assert "undefined_name is not defined" in "".join(shown.errors)


@needs_chromium
def test_a_dark_page_on_a_phone(tmp_path: Path) -> None:
    runs = [
        read_run(write_run(tmp_path / name, overrides=[f"train.lr={lr}"]))
        for name, lr in (("first-" * 20, 0.1), ("second", 0.2))
    ]
    page = tmp_path / "page.html"
    page.write_text(render(runs))
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    shown = show(page, tmp_path, width=390, height=8000, dark=True, script=overflow)
    assert shown.image.size == (390, 8000)
    assert shown.value == 0
    assert shown.pixels("#14171a") > 100_000  # the page, in dark
    assert shown.pixels("#7cb2ee") > 300  # the first run
    assert shown.pixels("#f0985a") > 300  # the second
    assert shown.errors == []


CONTROLS = """
  (() => {
    const seen = [];
    const loss = document.getElementById("chart-loss");
    const press = (key) => loss.dispatchEvent(new KeyboardEvent("keydown", { key }));
    const note = () => seen.push(loss.querySelector(".where").textContent + " | " +
      [...loss.querySelectorAll(".value")].map((v) => v.textContent).join(" "));
    press("Home"); note(); press("ArrowRight"); note(); press("Escape"); note();
    document.querySelector("[value=tokens]").click();
    document.querySelectorAll("[type=checkbox]").forEach((box) => box.click());
    const slider = document.getElementById("smoothing");
    slider.value = 90;
    slider.dispatchEvent(new Event("input"));
    document.querySelector("[value=dark]").click();
    press("End"); note();
    loss.querySelector("button").click();
    return [...seen, loss.querySelectorAll("[aria-pressed=false]").length];
  })()
"""


@needs_chromium
def test_the_controls_and_the_keyboard(tmp_path: Path) -> None:
    lines = [
        {"step": step, "tokens": 1024 * step, "loss": loss, "tokens_per_s": 10.0}
        for step, loss in ((1, 8.0), (2, 4.0), (3, None), (4, 1.0))
    ]
    page = tmp_path / "page.html"
    page.write_text(render([read_run(write_run(tmp_path / "run", lines))]))
    shown = show(page, tmp_path, script=CONTROLS)
    assert shown.value == ["steps 1 | 8", "steps 2 | 4", " | 1", "tokens 4,096 | 1", 1]
    assert shown.pixels("#14171a") > 100_000
    assert shown.errors == []


@needs_chromium
def test_a_live_page_shows_what_comes_later(tmp_path: Path) -> None:
    before = read_run(write_run(tmp_path / "run", metrics(20), ONE_START[:1]))
    first = render([before], live=Live("/events", "/data")).encode()
    write_lines(tmp_path / "run" / "metrics.jsonl", metrics(96))
    write_lines(tmp_path / "run" / "history.jsonl", ONE_START)
    later = json.dumps(page_data([read_run(tmp_path / "run")])).encode()
    answers = {
        "/": ("text/html; charset=utf-8", first),
        "/events": ("text/event-stream", b"retry: 60000\ndata: new\n\n"),
        "/data": ("application/json", later),
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            kind, content = answers.get(self.path, ("text/plain", b""))
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        later_is_shown = "document.querySelector('#overview .badge').textContent === 'finished'"
        shown = show(f"http://127.0.0.1:{server.server_port}/", tmp_path, until=later_is_shown)
        server.shutdown()
    overview = shown.dom.split('id="overview"')[1].split("</section>")[0]
    assert "finished" in overview
    assert "100" in overview
    loss = shown.dom.split('id="chart-loss"')[1].split("</figure>")[0]
    assert f">{metrics(96)[-1]['validation_loss']:.3f}<" in loss
