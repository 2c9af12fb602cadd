"""`longspan watch --web`: who gets the page, and that it follows the run."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from longspan.cli import main
from longspan.reporting import server as web
from longspan.reporting.server import Server
from tests.reporting.test_runs import ENDED, START, write_run

pytest.importorskip("bokeh")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(web, "POLL_S", 0.05)
    with Server(write_run(tmp_path / "run", START)) as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def get(server: Server, path: str, **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request("GET", path, headers=headers)
    return connection.getresponse()


def test_nothing_is_served_without_the_token(server: Server) -> None:
    token = server.token
    for path in ("/", "/data", "/events", f"/?token={token}x", "/?token=", f"/?token={token[:-1]}"):
        response = get(server, path)
        assert response.status == 403, path
        assert len(response.read()) < 100
    assert get(server, f"/{'../' * 5}etc/passwd?token={token}").status == 404
    assert get(server, f"/?token={token}", Host="evil.example").status == 403
    assert get(server, f"/data?token={token}", Host=f"localhost:{server.server_port}").status == 200


def test_an_address_that_is_none_is_refused(
    server: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as client:
        host = f"Host: 127.0.0.1:{server.server_port}"
        client.sendall(f"GET http://[::1 HTTP/1.1\r\n{host}\r\n\r\n".encode())
        assert client.recv(1_000).startswith(b"HTTP/1.1 403 ")
    assert capfd.readouterr().err == ""


def test_it_listens_on_loopback_alone(server: Server) -> None:
    assert server.server_address[0] == "127.0.0.1"
    other = socket.socket()
    other.bind(("127.0.0.2", server.server_port))  # the port is free on every other address
    other.close()


def test_the_page_and_its_data(server: Server) -> None:
    response = get(server, f"/?token={server.token}")
    page = response.read().decode()
    assert response.status == 200
    assert response.headers["Referrer-Policy"] == "no-referrer"
    assert f"/events?token={server.token}" in page
    data = json.loads(get(server, f"/data?token={server.token}").read())
    assert data["runs"][0]["name"] == "run"


def test_an_event_comes_when_the_run_writes_ends_and_starts_again(server: Server) -> None:
    stream = get(server, f"/events?token={server.token}")
    assert stream.headers["Content-Type"] == "text/event-stream"

    def next_event() -> str:
        while not (line := stream.readline().decode()).startswith("data:"):
            assert line, "the stream ended"
        return line

    next_event()  # at once
    history = server.folder / "history.jsonl"
    for event in (ENDED, START):
        with history.open("a") as file:
            file.write(json.dumps({"time": 2.0, **event}) + "\n")
        assert next_event() == "data: changed\n"
    # A run that is removed and begins anew in the same folder.
    moved = server.folder.with_name("moved")
    server.folder.rename(moved)
    next_event()
    assert get(server, f"/data?token={server.token}").status == 503
    shutil.move(moved, server.folder)
    next_event()
    assert get(server, f"/data?token={server.token}").status == 200


def test_a_page_that_was_closed_holds_no_stream(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "BEAT_S", 1e9)  # else a write would fail sooner or later
    monkeypatch.setattr(server, "streams", threading.BoundedSemaphore(1))
    for _ in range(3):
        assert server.streams.acquire(timeout=60)  # the one before has left
        server.streams.release()
        stream = get(server, f"/events?token={server.token}")
        assert stream.status == 200
        assert stream.readline() == b"data: changed\n"
        stream.close()


def test_a_port_in_use_and_a_folder_without_a_run_are_errors(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for port in (server.server_port, 70_000):
        assert main(["watch", str(server.folder), "--web", "--port", str(port)]) == 2
        assert "give another --port" in capsys.readouterr().err
    assert main(["watch", str(tmp_path / "nowhere"), "--web"]) == 2
    assert "expected a run folder" in capsys.readouterr().err


def test_from_the_command_line(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", START)
    command = [sys.executable, "-m", "longspan", "watch", str(folder), "--web"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as it:
        assert it.stdout is not None
        url = it.stdout.readline().strip()
        port, token = url.removeprefix("http://127.0.0.1:").split("/?token=")
        connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=60)
        connection.request("GET", f"/data?token={token}")
        assert connection.getresponse().status == 200
        it.send_signal(2)  # Ctrl-C
        _, errors = it.communicate(timeout=60)
    assert (it.returncode, errors) == (0, "")
