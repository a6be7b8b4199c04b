"""Push a finished folder to the Hub: look what is there, send what is missing, one commit, and read it back."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_retarget.errors import PublishError, RetargetError
from hf_retarget.files import hash_file, load_tensors
from hf_retarget.hub import ask, clean_token, explain, explained
from hf_retarget.progress import SILENT, Progress
from hf_retarget.publish.card import address_card
from hf_retarget.publish.contents import CARD, SAMPLES, fits, list_contents, list_weights
from hf_retarget.publish.paths import shorten_file
from hf_retarget.untrusted import MAX_DOCUMENT_BYTES, read_bytes, read_json

_TOKEN = "log in (hf auth login), set HF_TOKEN, or give --token"


@dataclass(frozen=True)
class Destination:
    """A repository of the Hub, and how to push there.

    Example:
        >>> Destination("ada/birds", private=True).revision is None
        True
    """

    repository: str
    """`owner/name`, or `name` for one's own."""
    private: bool = False
    """Make the repository private if it is new; refuse to push to one that is public."""
    revision: str | None = None
    """The branch, made if it is not there; `main` if not given."""
    message: str | None = None
    """Of the commit."""
    create_pr: bool = False
    """Open a pull request instead of committing to the branch."""
    replace_card: bool = False
    """Replace a README.md that is there."""
    token: str | None = field(default=None, repr=False)
    """If not the one of the login or HF_TOKEN."""


def check_destination(destination: Destination) -> Destination:
    """Whether there is a name, a token and a right to write; the destination with the full name of the repository."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.constants import is_offline_mode
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # it is, but not by name

    destination = replace(destination, token=clean_token(destination.token))
    name = destination.repository
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise PublishError(f"'{name}' is no name for a repository: {' '.join(str(error).split())}") from error
    if is_offline_mode():
        raise PublishError(f"offline mode is on, so nothing can be pushed to '{name}'; unset HF_HUB_OFFLINE")
    if not (destination.token or get_token()):
        raise PublishError(f"there is no token to push to '{name}' with; {_TOKEN}")
    api = HfApi(token=destination.token)
    with explained(PublishError, name):
        who = ask(api.whoami)
    found = replace(destination, repository=name if "/" in name else f"{who['name']}/{name}")
    _check_rights(found, who)
    try:
        with explained(PublishError, found.repository, found.revision):
            there = ask(lambda: api.model_info(found.repository))
    except PublishError as error:
        if not isinstance(error.__cause__, RepositoryNotFoundError | RevisionNotFoundError):
            raise
        if found.create_pr:
            raise PublishError(
                f"there is no '{found.repository}' to open a pull request on; push without --create-pr, which makes it"
            ) from error
        return found
    if found.private and there.private is False:
        raise PublishError(
            f"'{found.repository}' is there already, and public; make it private on the Hub, or name another"
        )
    return found


def _check_rights(destination: Destination, who: dict[str, Any]) -> None:
    token = (who.get("auth") or {}).get("accessToken") or {}
    if token.get("role") == "read":
        raise PublishError(
            f"the token of '{who['name']}' may only read; make one that may write "
            f"(https://huggingface.co/settings/tokens), then {_TOKEN}"
        )
    owner = destination.repository.partition("/")[0]
    places = {who["name"]} | {each["name"] for each in who.get("orgs") or [] if each.get("roleInOrg") != "read"}
    if owner not in places and not destination.create_pr:
        raise PublishError(
            f"'{who['name']}' may not write to '{owner}'; push to one of {', '.join(sorted(places))}, "
            "or propose it with --create-pr"
        )


if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd

TELLING = ("port.json", "finetune.json", "recipe.yaml", "report.html", "plane/plane.json")
"""Files that say where inputs came from."""

_GIT = 40  # hex digits of git's id of a file; a sha256 has 64


def make_operations(files: Mapping[str, Path], destination: Destination) -> dict[str, CommitOperationAdd]:
    """What a commit adds, by path."""
    from huggingface_hub import CommitOperationAdd

    command = _command(files.get("port.json"))

    def content(name: str, path: Path) -> str | bytes:
        if name == CARD:
            try:
                card = read_bytes(path).decode()
            except ValueError as error:
                raise PublishError(f"'{path}' cannot be read: {error}; correct it, and push again") from error
            return address_card(card, destination.repository, destination.revision).encode()
        return _shortened(name, path, command) if name in TELLING else str(path)

    return {name: CommitOperationAdd(name, content(name, path)) for name, path in files.items()}


def is_same(operation: CommitOperationAdd, digest: str | None) -> bool:
    """Whether a file has the hash that the Hub lists: the sha256 of a large file, git's id of a small one.

    Example:
        >>> from huggingface_hub import CommitOperationAdd
        >>> is_same(CommitOperationAdd("empty", b""), "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391")
        True
    """
    ours = operation.upload_info
    if digest is None or len(digest) != _GIT:
        return digest == ours.sha256.hex()
    with operation.as_file() as file:
        return digest == hashlib.sha1(f"blob {ours.size}\0".encode() + file.read(), usedforsecurity=False).hexdigest()


def _shortened(name: str, path: Path, command: str) -> str | bytes:
    try:
        before = read_bytes(path, MAX_DOCUMENT_BYTES).decode()
    except ValueError:
        return str(path)
    after = shorten_file(name, before, command)
    return str(path) if after == before else after.encode()


def _command(port: Path | None) -> str:
    """The command line that the report shows, too."""
    try:
        return str(read_json(port, MAX_DOCUMENT_BYTES)["command"]) if port else ""
    except (KeyError, TypeError, ValueError):
        return ""


if TYPE_CHECKING:
    from huggingface_hub import HfApi


def find_difference(api: HfApi, repository: str, commit: str, files: Mapping[str, Path]) -> str | None:
    """Download files of a commit past the cache, load their tensors, and compare the bytes: the first that differs."""
    for name, path in files.items():
        with tempfile.TemporaryDirectory(prefix="hf-retarget-") as place:
            got = Path(ask(lambda: _download(api, repository, name, commit, place)))  # noqa: B023  called at once
            if hash_file(got) != hash_file(path):
                return name
            if got.suffix == ".safetensors" and not _loads(got):
                return name
    return None


def _download(api: HfApi, repository: str, name: str, commit: str, place: str) -> str:
    return str(api.hf_hub_download(repository, name, revision=commit, cache_dir=place))


def _loads(path: Path) -> bool:
    try:
        return bool(load_tensors(path)[0])
    except OSError:
        return False


if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, HfApi

_MOVED = 412  # the Hub's answer to a commit on top of what is not the newest
_RACES = 5  # commits of others that may come between looking and committing


@dataclass(frozen=True)
class Pushed:
    """What is on the Hub now."""

    repository: str
    revision: str
    """The branch, or `refs/pr/N`."""
    commit: str
    url: str
    pull_request: str | None
    """The address of the pull request, if one was asked for."""
    files: tuple[str, ...]
    kept_card: bool
    """Whether another README.md was there and was left alone."""
    new: bool
    """Whether there was anything to commit: False if all of it was there already."""


@dataclass(frozen=True)
class _Remote:
    commit: str
    digests: Mapping[str, str]
    """By path: the sha256 of large files, git's id of small ones."""


def push_folder(
    folder: str | Path,
    destination: Destination,
    *,
    trajectory: bool = False,
    samples: bool = False,
    verify: bool = True,
    progress: Progress = SILENT,
) -> Pushed:
    """Push a finished port or fine-tuning in one commit: until all of it is there, nothing of it is to be seen.

    What has arrived in an earlier attempt is not sent again. With `verify`, the weights are downloaded afterwards,
    loaded, and compared by hash. A report that shows images of data that are not on the Hub goes only with `samples`.
    """
    from huggingface_hub import HfApi

    files, left_out = list_contents(folder, trajectory=trajectory, samples=samples)
    destination = check_destination(destination)
    with _translated(destination):
        push = _Push(HfApi(token=destination.token), destination, make_operations(files, destination))
        size = sum(each.upload_info.size for each in push.operations.values())
        progress.say(f"pushing {len(files)} files ({size / 1e6:,.1f} MB) to {destination.repository}")
        _tell_left_out(left_out, progress)
        push.make_place()
        pushed = ask(push.commit)
    if pushed.kept_card:
        progress.say(f"the {CARD} that was there is kept; --replace-card replaces it")
    if verify:
        progress.say("reading it back")
        _read_back(push, pushed, files)
    return pushed


def _tell_left_out(names: list[str], progress: Progress) -> None:
    recorded = [name for name in names if name.startswith("trajectory/")]
    shown = [name for name in names if fits(name, SAMPLES)]
    if recorded:
        progress.say("the recorded trajectory is left out; push --trajectory sends it, too")
    if shown:
        progress.say(f"left out, because your images are in it: {', '.join(shown)}; push --samples sends it, too")
    others = [name for name in names if name not in (*recorded, *shown)]
    if others:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        progress.say(f"left out, because it is not known: {', '.join(others[:3])}{more}")


class _Push:
    """One push: the operations keep what was uploaded over its attempts."""

    def __init__(self, api: HfApi, destination: Destination, operations: dict[str, CommitOperationAdd]) -> None:
        self.api, self.destination, self.operations = api, destination, operations
        self._tried = False

    @property
    def branch(self) -> str:
        return self.destination.revision or "main"

    @property
    def message(self) -> str:
        return self.destination.message or "Push a model with hf-retarget"

    def make_place(self) -> None:
        """The repository and the branch, if they are not there yet."""
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

        name, private = self.destination.repository, self.destination.private
        try:
            ask(self.look)
        except RepositoryNotFoundError:
            ask(lambda: self.api.create_repo(name, private=private or None, exist_ok=True))
        except RevisionNotFoundError:
            pass
        else:
            return
        if self.branch != "main" and not self.destination.create_pr and not self.branch.startswith("refs/"):
            ask(lambda: self.api.create_branch(name, branch=self.branch, exist_ok=True))

    def look(self, revision: str | None = None) -> _Remote:
        """What is there."""
        found = self.api.model_info(self.destination.repository, revision=revision or self.branch, files_metadata=True)
        digests = {each.rfilename: each.lfs.sha256 if each.lfs else str(each.blob_id) for each in found.siblings or ()}
        return _Remote(str(found.sha), digests)

    def commit(self) -> Pushed:
        """Commit on top of what is there; if all of it is there already, an earlier commit whose answer was lost."""
        from huggingface_hub.errors import HfHubHTTPError

        for attempt in range(_RACES):
            remote = self.look()
            if self._has_all(remote):
                return self._pushed(remote.commit, remote, new=self._tried)
            if self.destination.create_pr and (found := self._find_pull()):
                return found
            try:
                return self._commit_on(remote)
            except HfHubHTTPError as error:
                if error.response.status_code != _MOVED or attempt == _RACES - 1:
                    raise
        raise AssertionError("unreachable")

    def _commit_on(self, remote: _Remote) -> Pushed:
        self._tried = True
        made = self.api.create_commit(
            self.destination.repository,
            self._wanted(remote),
            commit_message=self.message,
            revision=self.branch,
            create_pr=self.destination.create_pr,
            parent_commit=remote.commit,
        )
        return self._pushed(made.oid, remote, new=True, revision=made.pr_revision, pull_request=made.pr_url)

    def _find_pull(self) -> Pushed | None:
        """A pull request of this name that has it all: opened by an attempt whose answer was lost."""
        from huggingface_hub.errors import RevisionNotFoundError

        for pull in self.api.get_repo_discussions(self.destination.repository, discussion_type="pull_request"):
            if pull.status in ("open", "draft") and pull.title == self.message:
                revision = f"refs/pr/{pull.num}"
                try:
                    remote = self.look(revision)
                except RevisionNotFoundError:
                    continue
                if self._has_all(remote):
                    facts = {"revision": revision, "pull_request": pull.url}
                    return self._pushed(remote.commit, remote, new=self._tried, **facts)
        return None

    def _wanted(self, remote: _Remote) -> list[CommitOperationAdd]:
        return [each for name, each in self.operations.items() if name != CARD or not self._keeps_card(remote)]

    def _keeps_card(self, remote: _Remote) -> bool:
        there = remote.digests.get(CARD)
        if there is None or self.destination.replace_card or CARD not in self.operations:
            return False
        return not is_same(self.operations[CARD], there)

    def _has_all(self, remote: _Remote) -> bool:
        return all(is_same(each, remote.digests.get(each.path_in_repo)) for each in self._wanted(remote))

    def _pushed(
        self, commit: str, remote: _Remote, *, new: bool, revision: str | None = None, pull_request: str | None = None
    ) -> Pushed:
        name = self.destination.repository
        return Pushed(
            repository=name,
            revision=revision or self.branch,
            commit=commit,
            url=f"{self.api.endpoint}/{name}",
            pull_request=pull_request,
            files=tuple(each.path_in_repo for each in self._wanted(remote)),
            kept_card=self._keeps_card(remote),
            new=new,
        )


def _read_back(push: _Push, pushed: Pushed, files: Mapping[str, Path]) -> None:
    where = f"'{pushed.repository}' has the commit {pushed.commit[:8]}"
    try:
        with _translated(push.destination):
            remote = ask(lambda: push.look(pushed.commit))
            wrong = next((n for n in pushed.files if not is_same(push.operations[n], remote.digests.get(n))), None)
            if wrong is None:
                names = [name for name in (*list_weights(dict(files)), "config.json") if name in files]
                wrong = find_difference(push.api, pushed.repository, pushed.commit, {n: files[n] for n in names})
    except RetargetError as error:
        raise PublishError(f"{where}, but it could not be read back: {error}; push again to compare it") from error
    if wrong:
        raise PublishError(f"{where}, but {wrong} is not what is here; push again")


@contextmanager
def _translated(destination: Destination) -> Iterator[None]:
    """Every error of the client, of its threads and of its uploads as one of ours."""
    try:
        yield
    except RetargetError:
        raise
    except Exception as error:
        raise _translate(error, destination) from error


def _translate(error: Exception, destination: Destination) -> Exception:
    name, said = destination.repository, " ".join(str(error).split())[:300]
    if "Invalid metadata in README.md" in said:
        return PublishError(f"the Hub refuses the {CARD}: {said}; correct the lines at its head, and push again")
    if getattr(getattr(error, "response", None), "status_code", None) == _MOVED:
        return PublishError(f"somebody else commits to '{name}' all the time; push again when they are done")
    if words := explain(error, name, destination.revision):
        return PublishError(words)
    if isinstance(error, (OSError, RuntimeError, ValueError)):
        return PublishError(f"pushing to '{name}' failed: {said}; push again: what has arrived is not sent again")
    return error
