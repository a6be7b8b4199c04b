"""Users, organisations and tokens: who is asking, and what they may do."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .files import write_atomically


@dataclass(frozen=True)
class User:
    """Somebody with an account: a token that may write, one that may only read."""

    name: str
    organisations: tuple[str, ...] = ()
    token: str = field(default="", repr=False)
    read_token: str = field(default="", repr=False)


@dataclass(frozen=True)
class Identity:
    """A user as a token shows them: with the rights of that token."""

    user: User
    role: str  # "read" or "write"

    @property
    def name(self) -> str:
        return self.user.name

    def belongs_to(self, namespace: str) -> bool:
        """Whether repositories of this namespace are theirs.

        >>> Identity(User("ada", ("analysts",)), "read").belongs_to("analysts")
        True
        """
        return namespace == self.name or namespace in self.user.organisations

    def describe(self) -> dict[str, Any]:
        """What `whoami` says of them."""
        organisations = [{"type": "org", "name": name, "roleInOrg": "write"} for name in self.user.organisations]
        return {
            "type": "user",
            "id": self.name,
            "name": self.name,
            "fullname": self.name.title(),
            "email": f"{self.name}@example.org",
            "emailVerified": True,
            "isPro": False,
            "orgs": organisations,
            "auth": {"type": "access_token", "accessToken": {"displayName": self.role, "role": self.role}},
        }


class Accounts:
    """All users, kept in one file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        known = json.loads(file.read_text()) if file.exists() else []
        self._users = {each["name"]: User(**each | {"organisations": tuple(each["organisations"])}) for each in known}

    def __iter__(self) -> Any:
        return iter(self._users.values())

    def add(self, name: str, organisations: tuple[str, ...] = ()) -> User:
        """Open an account, or change the organisations of one; tokens follow from the name and are no secret."""
        user = User(name, tuple(organisations), f"hf_{name}_write", f"hf_{name}_read")
        self._users[name] = user
        write_atomically(self._file, json.dumps([asdict(each) for each in self]).encode())
        return user

    def identify(self, token: str) -> Identity | None:
        """Whose token this is; None if nobody's."""
        for user in self:
            if token == user.token:
                return Identity(user, "write")
            if token == user.read_token:
                return Identity(user, "read")
        return None
