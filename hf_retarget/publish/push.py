"""Push a finished folder to the Hub: compare, send what is missing, commit once, and read it back."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import CommitOperationAdd, HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # exported without its type
from huggingface_hub.utils.sha import git_hash

from hf_retarget.errors import PublishError, RetargetError
from hf_retarget.files import hash_file
from hf_retarget.hub import ask, clean_token, explain, explained, one_line
from hf_retarget.names import CARD, FINETUNE, MODEL_CONFIG, PLANE, PORT, RECIPE, REPORT
from hf_retarget.progress import SILENT, Progress
from hf_retarget.publish.card import address_card
from hf_retarget.publish.contents import SAMPLES, list_contents, list_weights, matches, shorten_file
from hf_retarget.untrusted import MAX_DOCUMENT_BYTES, read_bytes, read_json

_TOKEN = "log in (hf auth login), set HF_TOKEN, or give --token"
_WITH_PATHS = (PORT, FINETUNE, RECIPE, REPORT, f"plane/{PLANE}")
"""Files that name the inputs, and so paths of this machine."""
_GIT = 40  # hex digits of git's id of a file; a sha256 has 64
_MOVED = 412  # the Hub's answer to a commit whose parent is not the newest
_RACES = 5  # commits of others that may come between looking and committing


@dataclass(frozen=True)
class Destination:
    """A repository on the Hub, and how to push there."""

    repository: str
    """`owner/name`, or `name` for one's own."""
    private: bool = False
    """Make the repository private if it is new; refuse to push to one that is public."""
    revision: str | None = None
    """The branch, created if it does not exist; `main` if not given."""
    message: str | None = None
    """Of the commit."""
    create_pr: bool = False
    """Open a pull request instead of committing to the branch."""
    replace_card: bool = False
    """Replace an existing README.md."""
    token: str | None = field(default=None, repr=False)
    """If not the one of the login or HF_TOKEN."""


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
    """Whether there was another README.md, which was kept."""
    new: bool
    """Whether this push made a commit: False if everything was there already."""


def check_destination(destination: Destination) -> Destination:
    """Check the name, the token and the right to write; the destination with the full name of the repository."""
    destination = replace(destination, token=clean_token(destination.token))
    name = destination.repository
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise PublishError(f"'{name}' is no name for a repository: {one_line(error)}") from error
    if constants.is_offline_mode():
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


def push_folder(
    folder: str | Path,
    destination: Destination,
    *,
    trajectory: bool = False,
    samples: bool = False,
    verify: bool = True,
    progress: Progress = SILENT,
) -> Pushed:
    """Push a finished port or fine-tuning in one commit: until all of it is there, nothing of it is visible.

    What arrived in an earlier attempt is not sent again. With `verify`, the weights are downloaded afterwards
    and compared by hash. A report that shows images of data that are not on the Hub is pushed only with `samples`.
    """
    files, left_out = list_contents(folder, trajectory=trajectory, samples=samples)
    destination = check_destination(destination)
    with explained(PublishError, destination.repository, words=partial(_explain, destination)):
        push = _Push(HfApi(token=destination.token), destination, files)
        size = sum(each.upload_info.size for each in push.operations.values())
        progress.say(f"pushing {len(files)} files ({size / 1e6:,.1f} MB) to {destination.repository}")
        _report_left_out(left_out, progress)
        push.make_place()
        pushed = ask(push.commit)
    if pushed.kept_card:
        progress.say(f"the {CARD} that was there is kept; --replace-card replaces it")
    if verify:
        progress.say("reading it back")
        _read_back(push, pushed)
    return pushed


def _report_left_out(names: list[str], progress: Progress) -> None:
    recorded = [name for name in names if name.startswith("trajectory/")]
    shown = [name for name in names if matches(name, SAMPLES)]
    others = [name for name in names if name not in (*recorded, *shown)]
    if recorded:
        progress.say("the recorded trajectory is left out; push --trajectory sends it, too")
    if shown:
        progress.say(f"left out, because your images are in it: {', '.join(shown)}; push --samples sends it, too")
    if others:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        progress.say(f"left out, because it is not known: {', '.join(others[:3])}{more}")


class _Remote(NamedTuple):
    commit: str
    digests: Mapping[str, str]
    """By path: the sha256 of large files, git's id of small ones."""


class _Push:
    """One push. Its operations keep what was uploaded, so that a repeated commit sends only the rest.

    `upload_folder` would follow links and upload everything again with each attempt; `metadata_update` would add a
    second commit.
    """

    def __init__(self, api: HfApi, destination: Destination, files: Mapping[str, Path]) -> None:
        self.api, self.destination, self.files = api, destination, files
        self.branch = destination.revision or "main"
        self.message = destination.message or "Push a model with hf-retarget"
        self.operations = {name: CommitOperationAdd(name, content) for name, content in self._contents()}
        self._tried = False

    def _contents(self) -> Iterator[tuple[str, str | bytes]]:
        """What is pushed, by path: bytes where they differ from those of the file, else the path of the file."""
        command = ""  # which the report shows, too
        with suppress(KeyError, TypeError, ValueError):
            command = str(read_json(self.files[PORT], MAX_DOCUMENT_BYTES)["command"])
        for name, path in self.files.items():
            before = ""
            try:
                if name == CARD or name in _WITH_PATHS:
                    before = read_bytes(path, MAX_DOCUMENT_BYTES).decode()
            except ValueError as error:
                if name == CARD:
                    raise PublishError(f"'{path}' cannot be read: {error}; correct it, and push again") from error
            if name == CARD:
                after = address_card(before, self.destination.repository, self.destination.revision)
            else:
                after = shorten_file(path.name, before, command) if before else ""
            yield name, str(path) if after == before else after.encode()

    def make_place(self) -> None:
        """Create the repository and the branch if they do not exist."""
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
        """Commit on top of what is there, unless an earlier attempt did so and only its answer was lost."""
        for tries_left in reversed(range(_RACES)):
            remote = self.look()
            if self._has_all(remote):
                return self._pushed(remote.commit, remote, new=self._tried)
            if self.destination.create_pr and (found := self._find_pull()):
                return found
            self._tried = True
            try:
                made = self.api.create_commit(
                    self.destination.repository,
                    self._wanted(remote),
                    commit_message=self.message,
                    revision=self.branch,
                    create_pr=self.destination.create_pr,
                    parent_commit=remote.commit,
                )
                return self._pushed(made.oid, remote, new=True, revision=made.pr_revision, pull_request=made.pr_url)
            except HfHubHTTPError as error:
                if error.response.status_code != _MOVED or not tries_left:
                    raise
        raise AssertionError("unreachable")

    def _find_pull(self) -> Pushed | None:
        """A pull request with this title and these files, opened by an attempt whose answer was lost."""
        for pull in self.api.get_repo_discussions(self.destination.repository, discussion_type="pull_request"):
            if pull.status not in ("open", "draft") or pull.title != self.message:
                continue
            revision = f"refs/pr/{pull.num}"
            try:
                remote = self.look(revision)
            except RevisionNotFoundError:
                continue
            if self._has_all(remote):
                return self._pushed(remote.commit, remote, new=self._tried, revision=revision, pull_request=pull.url)
        return None

    def _wanted(self, remote: _Remote) -> list[CommitOperationAdd]:
        return [each for name, each in self.operations.items() if name != CARD or not self._keeps_card(remote)]

    def _keeps_card(self, remote: _Remote) -> bool:
        if CARD not in remote.digests or CARD not in self.operations or self.destination.replace_card:
            return False
        return not self.is_there(CARD, remote)

    def _has_all(self, remote: _Remote) -> bool:
        return all(self.is_there(each.path_in_repo, remote) for each in self._wanted(remote))

    def is_there(self, name: str, remote: _Remote) -> bool:
        """Whether the Hub lists a file with the hash of what is pushed."""
        operation, digest = self.operations[name], remote.digests.get(name)
        if digest is None or len(digest) != _GIT:
            return digest == operation.upload_info.sha256.hex()
        with operation.as_file() as file:
            return digest == git_hash(file.read())

    def differs(self, name: str, pushed: Pushed) -> bool:
        """Whether a file that was pushed as it is, downloaded past the cache, has other bytes than the one here."""
        with tempfile.TemporaryDirectory(prefix="hf-retarget-") as place:
            download = partial(self.api.hf_hub_download, revision=pushed.commit, cache_dir=place)
            got = ask(lambda: download(pushed.repository, name))
            return hash_file(Path(got)) != hash_file(self.files[name])

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


def _read_back(push: _Push, pushed: Pushed) -> None:
    """Compare the commit with what is here: all files by their listed hashes, the model also by its bytes."""
    where = f"'{pushed.repository}' has the commit {pushed.commit[:8]}"
    try:
        with explained(PublishError, pushed.repository, words=partial(_explain, push.destination)):
            remote = ask(lambda: push.look(pushed.commit))
            wrong = next((name for name in pushed.files if not push.is_there(name, remote)), None)
            model = (*list_weights(push.files), MODEL_CONFIG)
            wrong = wrong or next((name for name in model if push.differs(name, pushed)), None)
    except RetargetError as error:
        raise PublishError(f"{where}, but it could not be read back: {error}; push again to compare it") from error
    if wrong:
        raise PublishError(f"{where}, but {wrong} is not what is here; push again")


def _explain(destination: Destination, error: BaseException) -> str | None:
    """What an error of the client, of its threads or of its uploads means, and what to do next."""
    name, message = destination.repository, one_line(error)
    if "Invalid metadata in README.md" in message:
        return f"the Hub refuses the {CARD}: {message}; correct the lines at its head, and push again"
    if getattr(getattr(error, "response", None), "status_code", None) == _MOVED:
        return f"other commits to '{name}' keep coming in between; push again when they are done"
    if words := explain(error, name, destination.revision):
        return words
    if isinstance(error, (OSError, RuntimeError, ValueError)):
        return f"pushing to '{name}' failed: {message}; push again: what has arrived is not sent again"
    return None
