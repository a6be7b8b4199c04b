"""The Hub a test or a developer holds in the hand: accounts, repositories, faults, log, and two servers."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .accounts import Accounts, User
from .client import Client
from .faults import Fault, Faults
from .log import RequestLog
from .repository import Repository
from .routes import HUB_ROUTES, STORAGE_ROUTES
from .server import HOST, Server
from .storage import Storage

MEGABYTE = 1 << 20


class Hub:
    """A Hub on loopback. What it holds is in `root` and is there again the next time."""

    def __init__(
        self,
        root: Path | str,
        port: int = 0,
        *,
        multipart_from: int = 64 * MEGABYTE,
        part_size: int = 16 * MEGABYTE,
        page_size: int = 1000,
    ) -> None:
        self.root = Path(root).resolve()
        self.root.mkdir(parents=True, exist_ok=True)
        self.accounts = Accounts(self.root / "users.json")
        self.storage = Storage(self.root)
        self.faults, self.log = Faults(), RequestLog()
        self.multipart_from, self.part_size, self.page_size = multipart_from, part_size, page_size
        self._ports = (port, 0)
        self._servers: tuple[Server, ...] = ()
        self._secret = secrets.token_bytes(16)

    # Running

    def start(self) -> Hub:
        """Listen; on the same ports as before, if it was stopped."""
        hub = Server(self, HUB_ROUTES, self._ports[0], knows_tokens=True)
        storage = Server(self, STORAGE_ROUTES, self._ports[1], knows_tokens=False)
        self._servers, self._ports = (hub, storage), (hub.port, storage.port)
        return self

    def stop(self) -> None:
        """Close both servers; connections end, and new ones are refused."""
        for server in self._servers:
            server.stop()
        self._servers = ()

    @contextmanager
    def down(self) -> Iterator[None]:
        """A time in which nobody answers."""
        self.stop()
        try:
            yield
        finally:
            self.start()

    def __enter__(self) -> Hub:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def endpoint(self) -> str:
        """For `HF_ENDPOINT`."""
        return f"http://{HOST}:{self._ports[0]}"

    @property
    def storage_endpoint(self) -> str:
        """Where large files are: another origin, as the real Hub's CDN and bucket are."""
        return f"http://{HOST}:{self._ports[1]}"

    def page(self, kind: str, id: str) -> str:
        """The address of a repository."""
        return f"{self.endpoint}/{'' if kind == 'model' else f'{kind}s/'}{id}"

    def signature(self, path: str) -> str:
        """What shows that an address was given out by this Hub."""
        return hmac.new(self._secret, path.encode(), hashlib.sha256).hexdigest()[:32]

    def signed(self, origin: str, path: str) -> str:
        """An address that opens without a token."""
        return f"{origin}{path}?signature={self.signature(path)}"

    # What it holds

    def add_user(self, name: str, *organisations: str) -> User:
        """Open an account; `.token` may write in `name/…` and in the organisations' repositories, `.read_token` not."""
        return self.accounts.add(name, organisations)

    def repository(
        self,
        id: str,
        files: Mapping[str, bytes | Path | None] | None = None,
        *,
        kind: str = "model",
        private: bool | None = None,
        gated: str | bool | None = None,
    ) -> Repository:
        """A repository, made if need be, with these files committed to `main` if any are given."""
        found = self.storage.find(kind, id) or self.storage.create(kind, id, author=id.split("/")[0])
        if private is not None:
            found.update(private=private)
        if gated is not None:
            found.update(gated="auto" if gated is True else gated)
        if files:
            found.write(files)
        return found

    def has_repository(self, id: str, kind: str = "model") -> bool:
        """Whether there is one of this name."""
        return self.storage.find(kind, id) is not None

    # What goes wrong

    def inject(self, fault: Fault) -> None:
        """Any fault; the four below are the common ones."""
        self.faults.add(fault)

    def fail(
        self,
        route: str,
        status: int = 503,
        *,
        retry_after: int | None = None,
        headers: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        """The next call of a route is answered with a status; `times=None` for all calls from now on."""
        wait = {} if retry_after is None else {"Retry-After": str(retry_after)}
        self.inject(Fault(route, status=status, headers={**wait, **(headers or {})}, **options))

    def cut(self, route: str, after: int = 0, *, sending: bool = False, **options: Any) -> None:
        """The connection of the next call ends after so many bytes of the answer, or of what the client is sending."""
        self.inject(
            Fault(route, cut_request=after if sending else None, cut_answer=None if sending else after, **options)
        )

    def lose_answer(self, route: str, **options: Any) -> None:
        """The next call does what it should, but its answer never arrives: a commit lands and nobody is told."""
        self.inject(Fault(route, lose_answer=True, **options))

    def slow(self, route: str, seconds: float, **options: Any) -> None:
        """The next call is answered after a while."""
        self.inject(Fault(route, delay=seconds, **options))

    # Who asks

    def client(self, *, token: str | None = None, home: Path | None = None, **environment: str) -> Client:
        """A Python process of its own whose Hugging Face libraries talk to this Hub."""
        return Client(self.endpoint, home or self.root / "home", token, environment)
