"""Chromium without a window: what a page looks like, says on the console, and asks the network."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
PAGE_LOADS = 101845102
"""Chromium's number for requests of pages, in its network log; its own requests have others."""


@dataclass(frozen=True)
class Shown:
    """A page as Chromium has shown it."""

    dom: str
    errors: list[str]
    """Lines on the console, but for the one that Bokeh writes when it is loaded."""
    image: Image.Image
    requests: list[str]
    """URLs that the page asked the network for."""

    def attribute(self, name: str) -> list[str]:
        return re.findall(rf'{name}="([^"]*)"', self.dom)

    def pixels(self, colour: str) -> int:
        """How many pixels have exactly this colour, given as #rrggbb."""
        wanted = tuple(bytes.fromhex(colour[1:]))
        counts: Any = self.image.convert("RGB").getcolors(1 << 24)
        return sum(count for count, found in counts if found == wanted)


def show(
    page: str | Path, tmp_path: Path, *, width: int = 1180, height: int = 3000, dark: bool = False
) -> Shown:
    """Open a page in a window of this size, and wait until its scripts have run."""
    assert CHROMIUM is not None
    log, picture = tmp_path / "network.json", tmp_path / "page.png"
    command = [
        CHROMIUM,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--no-first-run",
        "--disable-background-networking",
        "--enable-logging=stderr",
        "--virtual-time-budget=8000",
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--window-size={width},{height}",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        f"--log-net-log={log}",
        f"--screenshot={picture}",
        "--dump-dom",
        str(page),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    # Chromium may end before it has closed the list of events.
    text = log.read_text().rstrip().rstrip(",")
    events = json.loads(text if text.endswith("}") else f"{text}]}}")["events"]
    parameters = [event.get("params", {}) for event in events]
    requests = [p["url"] for p in parameters if p.get("traffic_annotation") == PAGE_LOADS]
    console = re.findall(r'CONSOLE:\d+\] (".*?"), source', done.stderr, re.DOTALL)
    return Shown(
        done.stdout,
        [line for line in console if "[bokeh " not in line or "log level" not in line],
        Image.open(picture),
        [url for url in requests if not url.startswith(("file:", "data:"))],
    )
