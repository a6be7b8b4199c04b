"""What passes between the socket and the routes: a call, its answer, and a refusal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from email.message import Message
from io import BufferedIOBase
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from .accounts import Identity

PIECE = 1 << 20


class Cut(Exception):
    """The connection is to be cut here, without another byte."""


class Refusal(Exception):
    """An answer that is an error: status, the Hub's error code if it has one, and a sentence."""

    def __init__(
        self, status: int, message: str, code: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.headers = status, code, headers or {}

    def answer(self) -> Answer:
        """As the Hub words it: JSON in the body, and the same in headers, because a HEAD has no body.

        >>> Refusal(404, "Entry not found", "EntryNotFound").answer().headers["X-Error-Code"]
        'EntryNotFound'
        """
        named = {"X-Error-Code": self.code} if self.code else {}
        # A header is latin-1; a message may quote a file name that is not.
        message = str(self).encode("ascii", "backslashreplace").decode()
        return Answer.json({"error": str(self)}, self.status, {**named, "X-Error-Message": message, **self.headers})


@dataclass(frozen=True)
class Answer:
    """What is sent back: a body in memory, or a file of which the caller may ask a range."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    file: Path | None = None

    @classmethod
    def json(cls, content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
        """An answer in JSON.

        >>> Answer.json({"ok": True}).body
        b'{"ok": true}'
        """
        named = {"Content-Type": "application/json; charset=utf-8", **(headers or {})}
        return cls(status, named, json.dumps(content, ensure_ascii=False).encode())


class Body:
    """The body of a request, read once, whether it came with a length or in chunks."""

    def __init__(self, stream: BufferedIOBase, headers: Message, cut_after: int | None = None) -> None:
        self._stream, self._cut_after = stream, cut_after
        self._chunked = "chunked" in (headers.get("Transfer-Encoding") or "").lower()
        self._left = int(headers.get("Content-Length") or 0)
        self.received = 0
        self._pieces = self._receive()

    def __iter__(self) -> Iterator[bytes]:
        return self._pieces

    def read(self) -> bytes:
        """All that is left of it; the second time nothing is."""
        return b"".join(self._pieces)

    def json(self) -> Any:
        """The body as JSON; what is not JSON is the caller's mistake."""
        try:
            return json.loads(self.read() or b"{}")
        except ValueError as error:
            raise Refusal(400, f"The body is not JSON: {error}") from error

    def form(self) -> dict[str, list[str]]:
        """The body as a form, in which a name may come several times."""
        return parse_qs(self.read().decode())

    def _receive(self) -> Iterator[bytes]:
        for piece in self._chunks() if self._chunked else self._exactly(self._left):
            self.received += len(piece)
            yield piece

    def _exactly(self, count: int) -> Iterator[bytes]:
        while count:
            allowed = count if self._cut_after is None else min(count, self._cut_after - self.received)
            piece = self._stream.read(min(PIECE, allowed)) if allowed > 0 else b""
            if not piece:
                raise Cut  # by the caller, or by a fault that was asked for
            count -= len(piece)
            yield piece

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self._stream.readline().split(b";")[0] or b"0", 16):
            yield from self._exactly(size)
            self._stream.readline()
        while self._stream.readline().strip():
            pass  # trailers, which nobody sends


@dataclass(frozen=True)
class Call:
    """A request that has been understood: who asks for what."""

    method: str
    path: str
    query: Mapping[str, list[str]]
    headers: Message  # names in any case
    body: Body
    who: Identity | None

    def asks(self, name: str) -> bool:
        """Whether a switch in the query is on: `?recursive=true`, `?create_pr=1`."""
        return self.query.get(name, [""])[0].lower() in ("1", "true")
