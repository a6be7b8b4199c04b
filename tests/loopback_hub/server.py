"""The socket: reads a request, lets a route answer, writes the answer, and breaks off where a fault says so."""

from __future__ import annotations

import re
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import parse_qs, urlsplit

from .accounts import Identity
from .faults import Fault
from .log import Record
from .messages import PIECE, Answer, Body, Call, Cut, Refusal
from .routing import Route, find_route

if TYPE_CHECKING:
    from .hub import Hub

HOST = "127.0.0.1"


class Server(ThreadingHTTPServer):
    """A server on loopback that, when it stops, also ends the connections it has open."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, hub: Hub, routes: tuple[Route, ...], port: int, *, knows_tokens: bool) -> None:
        super().__init__((HOST, port), Handler)
        self.hub, self.routes, self.knows_tokens = hub, routes, knows_tokens
        self._connections: set[socket.socket] = set()
        self._resets: set[socket.socket] = set()
        self._stopping = False
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        self._connections.add(connection)
        return connection, address

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        if request in self._resets:
            self._resets.discard(request)
            self.close_request(request)  # without the orderly end, which would go out first
        else:
            super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news, nor is a connection that `stop` has ended; all else is our mistake.

        It is shown past whatever a test has put in the place of stderr: the test may be another one by now.
        """
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError) and not (self._stopping and isinstance(error, (OSError, ValueError))):
            traceback.print_exc(file=sys.__stderr__)

    def stop(self) -> None:
        """Refuse new connections and end those that are open."""
        self._stopping = True
        self.shutdown()
        self.server_close()
        for connection in tuple(self._connections):
            self.end(connection, reset=False)
        self._thread.join()

    def end(self, connection: socket.socket, *, reset: bool) -> None:
        """End a connection: in order (FIN), or as a crash would (RST)."""
        try:
            if reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self._resets.add(connection)
            else:
                connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other side was faster


class Handler(BaseHTTPRequestHandler):
    """One connection, which may carry many requests."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server_version = "LoopbackHub"

    def handle_any(self) -> None:
        """Answer one request, whatever its method."""
        server = cast(Server, self.server)
        address = urlsplit(self.path)
        route, parts = find_route(server.routes, self.command, address.path)
        fault = server.hub.faults.next_for(route.name, self.command, address.path)
        self.body = Body(self.rfile, self.headers, fault.cut_request if fault else None)
        self.record = Record(self.command, self.path, route.name, 0, fault=fault is not None)
        self.record = replace(self.record, range=self.headers["Range"], agent=self.headers["User-Agent"] or "")
        try:
            answer: Answer | None = self._answer(server, route, parts, fault)
            for _ in self.body:
                pass  # what a route did not read must not be taken for the next request
        except (Cut, ConnectionError):
            answer = None
        server.hub.log.answering()
        try:
            if answer is None or (fault and fault.lose_answer):
                raise Cut
            self._send(answer, fault or Fault("*"))
        except Cut:
            self.close_connection = True
            server.end(self.connection, reset=bool(fault and fault.reset))
        except ConnectionError:
            self.close_connection = True
        finally:
            server.hub.log.add(replace(self.record, received=self.body.received))

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_any

    def _answer(self, server: Server, route: Route, parts: dict[str, str], fault: Fault | None) -> Answer:
        if fault and fault.delay:
            time.sleep(fault.delay)
        try:
            who = self._identify(server)
            if fault and fault.page:
                return Answer(
                    200, {"Content-Type": "text/html"}, b"<html><title>Sign in to this network</title></html>"
                )
            if fault and fault.status is not None:
                raise Refusal(fault.status, fault.message, headers=fault.headers)
            address = urlsplit(self.path)
            call = Call(self.command, address.path, parse_qs(address.query), self.headers, self.body, who)
            return route.answer(server.hub, call, **parts)
        except Refusal as refusal:
            return refusal.answer()
        except (KeyError, TypeError, ValueError) as error:
            return Refusal(400, f"The request is malformed: {error!r}").answer()

    def _identify(self, server: Server) -> Identity | None:
        given = self.headers["Authorization"]
        self.record = replace(self.record, authorised=given is not None)
        if given is None:
            return None
        if not server.knows_tokens:
            # What a bucket says, too, of a signed address that comes with a token.
            raise Refusal(400, "InvalidArgument: Only one auth mechanism allowed; do not send a token to the storage")
        who = server.hub.accounts.identify(given.removeprefix("Bearer "))
        if who is None:
            raise Refusal(401, "Invalid credentials in Authorization header")
        self.record = replace(self.record, user=who.name)
        return who

    def _send(self, answer: Answer, fault: Fault) -> None:
        cut_after, flip = fault.cut_answer, fault.flip
        size = answer.file.stat().st_size if answer.file else len(answer.body)
        asked = None if fault.ignore_range else self.headers["Range"]
        status, start, stop = _range(asked, size) if answer.file else (answer.status, 0, size)
        self.record = replace(self.record, status=status)
        self.send_response(status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        elif status == 416:
            self.send_header("Content-Range", f"bytes */{size}")
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        for piece in _pieces(answer, start, stop):
            piece = piece if cut_after is None else piece[: cut_after - self.record.sent]
            place = -1 if flip is None else flip - self.record.sent
            if 0 <= place < len(piece):
                piece = piece[:place] + bytes([piece[place] ^ 1]) + piece[place + 1 :]
            self.wfile.write(piece)
            self.record = replace(self.record, sent=self.record.sent + len(piece))
            if cut_after is not None and self.record.sent >= cut_after:
                raise Cut

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: the Hub keeps a log of its own."""


def _range(header: str | None, size: int) -> tuple[int, int, int]:
    """Status, start and end for a Range header: one range, from the front or from the back.

    >>> _range("bytes=2-4", 10), _range("bytes=-3", 10), _range("bytes=12-", 10), _range(None, 10)
    ((206, 2, 5), (206, 7, 10), (416, 0, 0), (200, 0, 10))
    """
    found = re.fullmatch(r"\s*bytes\s*=\s*(\d*)\s*-\s*(\d*)\s*", header or "", re.IGNORECASE)
    if found is None or not any(found.groups()):
        return 200, 0, size
    first, last = found.groups()
    if not first:
        return 206, max(size - int(last), 0), size
    start, stop = int(first), min(int(last) + 1, size) if last else size
    return (206, start, stop) if start < stop else (416, 0, 0)


def _pieces(answer: Answer, start: int, stop: int) -> Iterator[bytes]:
    if not isinstance(answer.file, Path):
        yield answer.body
        return
    with answer.file.open("rb") as file:
        file.seek(start)
        while start < stop and (piece := file.read(min(PIECE, stop - start))):
            start += len(piece)
            yield piece
