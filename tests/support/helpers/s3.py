"""A real S3 server in this process, and a proxy before it that fails as networks do."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import fsspec
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
    fsspec.get_filesystem_class("s3").clear_instance_cache()  # which know the server of another module
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
    """Relays connections; cuts one off whenever so many more bytes were answered; tells every m-th request to wait."""

    def __init__(self, port: int, cut_every: int = 0, busy_every: int = 0) -> None:
        self.upstream, self.cut_every, self.busy_every = port, cut_every, busy_every
        self.requests = self.asked = self.answered = self.cut = self.refused = 0
        self.lock = threading.Lock()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self.listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, server = self.listener.accept()[0], socket.create_connection(("127.0.0.1", self.upstream))
                for relay in (self._ask, self._answer):
                    threading.Thread(target=relay, args=[client, server], daemon=True).start()

    def _ask(self, client: socket.socket, server: socket.socket) -> None:
        with client, server, suppress(OSError):
            while request := client.recv(65536):  # of an upload a part
                with self.lock:
                    self.requests += 1
                    self.asked += len(request)
                    is_busy = self.busy_every and self.requests % self.busy_every == 0
                    self.refused += bool(is_busy)
                if is_busy:
                    client.sendall(BUSY)
                    return
                server.sendall(request)

    def _answer(self, client: socket.socket, server: socket.socket) -> None:
        with client, server, suppress(OSError):
            while answer := server.recv(65536):
                with self.lock:
                    self.answered += len(answer)
                    is_cut = self.cut_every and self.answered > self.cut_every * (self.cut + 1)
                    self.cut += bool(is_cut)
                client.sendall(answer[: len(answer) // 2] if is_cut else answer)
                if is_cut:
                    client.shutdown(socket.SHUT_RDWR)
                    return


def environment(port: int) -> dict[str, str]:
    return {**os.environ, **settings(port)}
