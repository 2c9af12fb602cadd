"""`longspan watch --web`: the report of a run as a live page, for this machine and a token alone.

The server listens on 127.0.0.1. Every request must carry the token, and must name this machine as
its host: a page of another site that has its name resolve to 127.0.0.1 gets nothing.
"""

from __future__ import annotations

import json
import select
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import parse_qs

from longspan.errors import UserError
from longspan.loopback_server import HOST, LoopbackServer
from longspan.reporting.data import RunData, read_run
from longspan.reporting.page import Live, page_data, render
from longspan.reporting.terminal import fingerprint

POLL_S = 1.0
"""How often a run's folder is looked at for changes."""
BEAT_S = 15.0
"""How often a connection without news gets a comment, so that a dead one is noticed."""
MAX_STREAMS = 32
"""Pages that are kept up to date at once; each holds a thread."""


class Server(LoopbackServer):
    """Serves the live page of one run folder."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        read_run(folder)  # a folder that is no run is an error now, not in the browser
        self.folder = folder
        self.is_closing = threading.Event()
        self.streams = threading.BoundedSemaphore(MAX_STREAMS)
        super().__init__(_Handler, port)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/?token={self.token}"

    def read(self) -> RunData:
        return read_run(self.folder)

    def shutdown(self) -> None:
        self.is_closing.set()
        super().shutdown()


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    timeout = 60  # of a client that sends nothing

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")  # urlsplit raises for some
        token = parse_qs(query).get("token", [""])[-1]
        if not self.server.is_host(self.headers.get("Host", "")):
            self._refuse(HTTPStatus.FORBIDDEN, "this server is for 127.0.0.1 alone")
        elif not self.server.is_token(token):
            self._refuse(HTTPStatus.FORBIDDEN, "use the address that longspan watch has printed")
        elif (handle := self._paths().get(path)) is None:
            self._refuse(HTTPStatus.NOT_FOUND, "there is nothing here")
        else:
            try:
                handle()
            except UserError as error:  # the folder is gone; it may come back
                self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, str(error))

    def _paths(self) -> dict[str, Callable[[], None]]:
        return {"/": self._page, "/data": self._data, "/events": self._events}

    def _page(self) -> None:
        query = f"?token={self.server.token}"
        page = render(
            [self.server.read()], live=Live(events=f"/events{query}", data=f"/data{query}")
        )
        self._send("text/html; charset=utf-8", page.encode("utf-8", "replace"))

    def _data(self) -> None:
        self._send("application/json", json.dumps(page_data([self.server.read()])).encode())

    def _events(self) -> None:
        """A server-sent event at once, as the run may have written since the page was, and
        whenever it has written something.
        """  # fmt: skip
        if not self.server.streams.acquire(blocking=False):
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "too many pages are open")
            return
        try:
            self._head(HTTPStatus.OK, "text/event-stream")
            self.end_headers()
            seen: object = None
            quiet = 0.0
            while True:
                if (now := fingerprint(self.server.folder)) != seen:
                    self.wfile.write(b"data: changed\n\n")
                    seen, quiet = now, 0.0
                elif quiet >= BEAT_S:
                    self.wfile.write(b": still here\n\n")
                    quiet = 0.0
                self.wfile.flush()
                if self.server.is_closing.wait(POLL_S) or self._has_left():
                    break
                quiet += POLL_S
        finally:
            self.server.streams.release()
            self.close_connection = True

    def _has_left(self) -> bool:
        """Whether the page was closed: it sends nothing else."""
        is_readable = select.select([self.connection], [], [], 0)[0]
        return bool(is_readable) and not self.connection.recv(1, socket.MSG_PEEK)

    def _send(self, kind: str, body: bytes, status: HTTPStatus = HTTPStatus.OK) -> None:
        self._head(status, kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _head(self, status: HTTPStatus, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")  # the address holds the token
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        self.close_connection = True
        self._send("text/plain; charset=utf-8", f"{text}\n".encode(), status)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: request lines hold the token."""
