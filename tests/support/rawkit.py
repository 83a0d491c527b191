"""HTTP over a bare socket, for requests that no HTTP client would send."""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any, NamedTuple

import httpx


class Reply(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Wire:
    """A bare connection to a RunningServer."""

    def __init__(self, server, timeout: float = 20.0) -> None:
        url = httpx.URL(server.url)
        self.socket = socket.create_connection((url.host, url.port), timeout=timeout)
        self._read = self.socket.makefile("rb")

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, *parts: bytes) -> None:
        self.socket.sendall(b"".join(parts))

    def end(self) -> None:
        """Close the sending side only."""
        self.socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._read.close()
        self.socket.close()

    def reply(self) -> Reply:
        """The next answer."""
        status = int(self._read.readline().split(b" ")[1])
        headers = http.client.parse_headers(self._read)
        if "content-length" in headers:
            return Reply(status, headers, self._read.read(int(headers["content-length"])))
        body = b""
        while size := int(self._read.readline(), 16):
            body += self._read.read(size + 2)[:size]
        self._read.readline()
        return Reply(status, headers, body)

    def refusal(self, status: int) -> str:
        """What a refusal says, in the one shape that all have."""
        reply = self.reply()
        assert reply.status == status, reply.body
        error = reply.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert "\n" not in error["message"]
        return error["message"]

    def text(self) -> str:
        """The text of the next plain completion."""
        reply = self.reply()
        assert reply.status == 200, reply.body
        return reply.json()["choices"][0]["text"]

    def is_closed(self) -> bool:
        """Whether the other side ends the connection, before this one's timeout."""
        try:
            while self._read.read(1 << 16):
                pass
        except ConnectionError:
            pass
        return True


def head(path: str = "/v1/completions", method: str = "POST", **headers: object) -> bytes:
    """A request's head; underscores in names of headers stand for dashes."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def request(body: dict[str, Any], path: str = "/v1/completions", **headers: object) -> bytes:
    """A whole request."""
    content = json.dumps(body).encode()
    return head(path, content_length=len(content), **headers) + content
