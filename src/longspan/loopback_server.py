"""An HTTP server on the loopback interface, for whoever has its token."""

from __future__ import annotations

import hmac
import secrets
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from longspan.errors import UserError

HOST = "127.0.0.1"


class LoopbackServer(ThreadingHTTPServer):
    """Listens on `port`, or with 0 on any that is free; `token` is drawn unless it is given."""

    daemon_threads = True

    def __init__(
        self, handler: type[BaseHTTPRequestHandler], port: int = 0, token: str | None = None
    ) -> None:
        self.token = token or secrets.token_urlsafe(24)
        try:
            super().__init__((HOST, port), handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            text = f"cannot listen on {HOST}:{port}: {reason}; give another --port"
            raise UserError(text) from error

    def is_host(self, name: str) -> bool:
        """Whether a request names this server: a page of another one, under a name that leads here,
        does not (DNS rebinding).
        """
        return name in {f"{host}:{self.server_port}" for host in (HOST, "localhost")}

    def is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.token.encode())

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):  # a client has left
            super().handle_error(request, client_address)
