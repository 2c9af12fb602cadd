"""Chromium without a window: what a page looks like, says on the console, and asks the network.

It is driven by the DevTools protocol: JSON messages over two pipes, each ended by a NUL.
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None or shutil.which("bash") is None, reason="needs Chromium"
)
DRAWN = """
    document.documentElement.dataset.ready !== undefined
    && document.querySelectorAll(".chart:not([data-drawn])").length === 0
"""
"""Whether a report is complete: every chart is drawn."""
DEADLINE_S = 90.0


@dataclass(frozen=True)
class Shown:
    """A page as Chromium has shown it."""

    dom: str
    errors: list[str]
    """Errors and warnings on the console, with those of the Content-Security-Policy."""
    image: Image.Image
    requests: list[str]
    """URLs that the page asked the network for, but for the page itself."""
    value: Any
    """What the script returned."""

    def attribute(self, name: str) -> list[str]:
        return re.findall(rf' {name}="([^"]*)"', self.dom)

    def pixels(self, colour: str) -> int:
        """How many pixels have exactly this colour, given as #rrggbb."""
        wanted = tuple(bytes.fromhex(colour[1:]))
        counts: Any = self.image.convert("RGB").getcolors(1 << 24)
        return sum(count for count, found in counts if found == wanted)


class DevTools:
    """One page of a Chromium process."""

    def __init__(self, reader: int, writer: int) -> None:
        self._reader, self._writer = reader, writer
        self._buffer, self._last, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]

    def call(self, method: str, **parameters: Any) -> Any:
        """Send a command and return its result; events that come meanwhile are kept."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writer, json.dumps(message).encode() + b"\0")
        while True:
            found = self._read()
            if found.get("id") == self._last:
                assert "error" not in found, found
                return found["result"]
            self.events.append(found)

    def evaluate(self, script: str) -> Any:
        """The value of a script, as JSON; of a promise, what it resolves to."""
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_until(self, condition: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not self.evaluate(condition):
            assert time.monotonic() < deadline, f"never: {condition}"
            time.sleep(0.05)

    def of_event(self, method: str) -> list[dict[str, Any]]:
        return [event["params"] for event in self.events if event.get("method") == method]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            chunk = os.read(self._reader, 1 << 20)
            assert chunk, "Chromium has ended"
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found


@contextmanager
def chromium(profile: Path) -> Iterator[DevTools]:
    """A page of a new Chromium process, whose settings are in the folder `profile`."""
    assert CHROMIUM is not None
    commands, to_browser = os.pipe()
    from_browser, answers = os.pipe()
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    options += ["--no-first-run", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
    # Chromium reads commands from descriptor 3 and writes answers to descriptor 4.
    shell = f'exec "$@" 3<&{commands} 4>&{answers}'
    process = subprocess.Popen(
        ["bash", "-c", shell, "bash", CHROMIUM, *options],
        pass_fds=(commands, answers),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(commands)
    os.close(answers)
    try:
        yield DevTools(from_browser, to_browser)
    finally:
        process.terminate()
        process.wait(30)
        os.close(to_browser)
        os.close(from_browser)


def show(
    page: str | Path,
    tmp_path: Path,
    *,
    width: int = 1180,
    height: int = 3000,
    dark: bool = False,
    until: str = DRAWN,
    script: str = "null",
) -> Shown:
    """Open a page in a window of this size, wait `until` a condition holds, then run `script`."""
    url = page.as_uri() if isinstance(page, Path) else page
    with chromium(tmp_path / "profile") as tools:
        for domain in ("Page", "Runtime", "Log", "Network"):
            tools.call(f"{domain}.enable")
        tools.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        tools.call("Emulation.setEmulatedMedia", features=[scheme])
        tools.call("Page.navigate", url=url)
        tools.wait_until(f"document.readyState === 'complete' && ({until})")
        value = tools.evaluate(script)
        # The last changes are on the screen after two frames.
        tools.evaluate("new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))")
        dom = tools.evaluate("document.documentElement.outerHTML")
        picture = base64.b64decode(tools.call("Page.captureScreenshot")["data"])
        errors = [str(event) for event in tools.of_event("Runtime.exceptionThrown")]
        errors += [
            str(event["args"])
            for event in tools.of_event("Runtime.consoleAPICalled")
            if event["type"] in ("error", "warning", "assert")
        ]
        entries = [event["entry"] for event in tools.of_event("Log.entryAdded")]
        errors += [entry["text"] for entry in entries if entry["level"] in ("error", "warning")]
        requests = [e["request"]["url"] for e in tools.of_event("Network.requestWillBeSent")]
    return Shown(
        dom,
        errors,
        Image.open(io.BytesIO(picture)),
        [found for found in requests if found != url and not found.startswith("data:")],
        value,
    )
