"""A real S3 server in this process, and a proxy before it that fails as networks do."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

BUSY = (
    b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nContent-Length: 73\r\nConnection: close\r\n\r\n"
    b"<Error><Code>SlowDown</Code><Message>reduce your rate</Message></Error>  "
)


@contextmanager
def s3_server() -> Iterator[int]:
    """Yield the port of an empty server. Skips the test if the packages are missing."""
    pytest.importorskip("s3fs", reason="S3 needs s3fs")
    server_module = pytest.importorskip("moto.server", reason="the S3 server is moto's")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        yield server.get_host_and_port()[1]
    finally:
        server.stop()


def settings(port: int) -> dict[str, str]:
    """Return the environment with which clients find the server."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "NO_PROXY": "127.0.0.1",
    }


class Proxy:
    """Forwards connections. Every n-th long answer is cut off in its middle, every m-th connection is told to wait."""

    def __init__(self, port: int, cut_every: int = 0, busy_every: int = 0) -> None:
        self.upstream, self.cut_every, self.busy_every = port, cut_every, busy_every
        self.connections = self.answers = self.cut = self.refused = 0
        self.lock = threading.Lock()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self.listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                threading.Thread(target=self._serve, args=[client], daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError), socket.create_connection(("127.0.0.1", self.upstream)) as server:
            while request := self._request(client):
                with self.lock:
                    self.connections += 1
                    is_busy = self.busy_every and self.connections % self.busy_every == 0
                    self.refused += bool(is_busy)
                if is_busy:
                    client.sendall(BUSY)
                    return
                server.sendall(request)
                if not self._answer(server, client):
                    return

    def _request(self, client: socket.socket) -> bytes:
        return read_message(client, is_answer=False)

    def _answer(self, server: socket.socket, client: socket.socket) -> bool:
        answer = read_message(server, is_answer=True)
        head, _, body = answer.partition(b"\r\n\r\n")
        with self.lock:
            self.answers += len(body) > 1000
            is_cut = self.cut_every and len(body) > 1000 and self.answers % self.cut_every == 0
            self.cut += bool(is_cut)
        client.sendall(answer[: len(head) + 4 + len(body) // 2] if is_cut else answer)
        return not is_cut and bool(answer)


def read_message(source: socket.socket, *, is_answer: bool) -> bytes:
    """Return one HTTP message; what has no length ends with the connection."""
    data = b""
    while b"\r\n\r\n" not in data:
        some = source.recv(65536)
        if not some:
            return data
        data += some
    head, _, body = data.partition(b"\r\n\r\n")
    fields = {
        name.strip().lower(): value.strip()
        for name, _, value in (line.partition(b":") for line in head.split(b"\r\n")[1:])
    }
    if b"content-length" in fields:
        wanted = int(fields[b"content-length"])
        while len(body) < wanted:
            some = source.recv(65536)
            if not some:
                break
            body += some
    elif fields.get(b"transfer-encoding") == b"chunked":
        while not body.endswith(b"0\r\n\r\n") and not body.endswith(b"\r\n0\r\n\r\n"):
            some = source.recv(65536)
            if not some:
                break
            body += some
    return head + b"\r\n\r\n" + body


def environment(port: int) -> dict[str, str]:
    return {**os.environ, **settings(port)}
