"""Push a finished folder to the Hub: compare, upload what is missing, commit once, and verify."""

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
"""Files that may contain local paths."""
_GIT = 40  # hex digits of a git blob id; a sha256 has 64
_MOVED = 412  # HTTP status of a commit whose parent is not the latest
_RACES = 5  # attempts to commit while others do


@dataclass(frozen=True)
class Destination:
    """A repository on the Hub, and how to push there."""

    repository: str
    """`owner/name`, or `name` in the user's own namespace."""
    private: bool = False
    """Make a new repository private, and refuse to push to an existing public one."""
    revision: str | None = None
    """The branch, created if it does not exist; by default `main`."""
    message: str | None = None
    """The commit message."""
    create_pr: bool = False
    """Open a pull request instead of committing to the branch."""
    replace_card: bool = False
    """Replace an existing README.md."""
    token: str | None = field(default=None, repr=False)
    """By default, the token of the login or HF_TOKEN."""


@dataclass(frozen=True)
class Pushed:
    """The result of a push."""

    repository: str
    revision: str
    """The branch, or `refs/pr/N`."""
    commit: str
    url: str
    pull_request: str | None
    """The URL of the pull request, if one was requested."""
    files: tuple[str, ...]
    kept_card: bool
    """Whether an existing, different README.md was kept."""
    new: bool
    """Whether a commit was made; False if everything was up to date."""


def check_destination(destination: Destination) -> Destination:
    """Check name, token and write access, and complete the name of the repository."""
    destination = replace(destination, token=clean_token(destination.token))
    name = destination.repository
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise PublishError(f"'{name}' is not a valid repository name: {one_line(error)}") from error
    if constants.is_offline_mode():
        raise PublishError(f"cannot push to '{name}' in offline mode; unset HF_HUB_OFFLINE")
    if not (destination.token or get_token()):
        raise PublishError(f"pushing to '{name}' needs a token; {_TOKEN}")
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
                f"'{found.repository}' does not exist, so it takes no pull request; create it without --create-pr"
            ) from error
        return found
    if found.private and there.private is False:
        raise PublishError(
            f"'{found.repository}' already exists and is public; make it private on the Hub, or name another"
        )
    return found


def _check_rights(destination: Destination, who: dict[str, Any]) -> None:
    token = (who.get("auth") or {}).get("accessToken") or {}
    if token.get("role") == "read":
        raise PublishError(
            f"the token of '{who['name']}' is read-only; create one with write access "
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
    """Push a finished port or fine-tuning in one commit, so that it becomes visible all at once.

    Files uploaded in an earlier attempt are not sent again. With `verify`, the weights are downloaded afterwards and
    compared by hash. A report that shows images of data that are not on the Hub is pushed only with `samples`.
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
        progress.say(f"the existing {CARD} is kept; --replace-card replaces it")
    if verify:
        progress.say("verifying")
        _read_back(push, pushed)
    return pushed


def _report_left_out(names: list[str], progress: Progress) -> None:
    recorded = [name for name in names if name.startswith("trajectory/")]
    shown = [name for name in names if matches(name, SAMPLES)]
    others = [name for name in names if name not in (*recorded, *shown)]
    if recorded:
        progress.say("the recorded trajectory is left out; push --trajectory includes it")
    if shown:
        progress.say(f"left out, because they show your images: {', '.join(shown)}; push --samples includes them")
    if others:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        progress.say(f"left out, because they are not part of a port: {', '.join(others[:3])}{more}")


class _Remote(NamedTuple):
    commit: str
    digests: Mapping[str, str]
    """By path: the sha256 of large files, the git blob id of small ones."""


class _Push:
    """One push. Its operations remember uploads, so that a repeated commit sends only the rest.

    `upload_folder` would follow links and upload everything again at each attempt; `metadata_update` would add a
    second commit.
    """

    def __init__(self, api: HfApi, destination: Destination, files: Mapping[str, Path]) -> None:
        self.api, self.destination, self.files = api, destination, files
        self.branch = destination.revision or "main"
        self.message = destination.message or "Push a model with hf-retarget"
        self.operations = {name: CommitOperationAdd(name, content) for name, content in self._contents()}
        self._tried = False

    def _contents(self) -> Iterator[tuple[str, str | bytes]]:
        """The contents to push, by path: the path of the file, or bytes if its text has to change."""
        command = ""  # shown in the report
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
            try:
                ask(lambda: self.api.create_repo(name, private=private or None, exist_ok=True))
            except KeyError as error:  # 409 without the address of a repository that is there
                raise PublishError(f"the Hub does not make '{name}' now (409); try again later") from error
        except RevisionNotFoundError:
            pass
        else:
            return
        if self.branch != "main" and not self.destination.create_pr and not self.branch.startswith("refs/"):
            ask(lambda: self.api.create_branch(name, branch=self.branch, exist_ok=True))

    def look(self, revision: str | None = None) -> _Remote:
        """The current state of the repository."""
        found = self.api.model_info(self.destination.repository, revision=revision or self.branch, files_metadata=True)
        digests = {each.rfilename: each.lfs.sha256 if each.lfs else str(each.blob_id) for each in found.siblings or ()}
        return _Remote(str(found.sha), digests)

    def commit(self) -> Pushed:
        """Commit, unless an earlier attempt did so and only its response was lost."""
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
        """A pull request with this title and these files, opened by an attempt whose response was lost."""
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
        """Whether the Hub lists a file with the hash of its pushed content."""
        operation, digest = self.operations[name], remote.digests.get(name)
        if digest is None or len(digest) != _GIT:
            return digest == operation.upload_info.sha256.hex()
        with operation.as_file() as file:
            return digest == git_hash(file.read())

    def differs(self, name: str, pushed: Pushed) -> bool:
        """Whether a file that was pushed unchanged differs from the local one when downloaded without the cache."""
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
    """Verify a commit: all files by their listed hashes, the model also by its bytes."""
    where = f"'{pushed.repository}' has the commit {pushed.commit[:8]}"
    try:
        with explained(PublishError, pushed.repository, words=partial(_explain, push.destination)):
            remote = ask(lambda: push.look(pushed.commit))
            wrong = next((name for name in pushed.files if not push.is_there(name, remote)), None)
            model = (*list_weights(push.files), MODEL_CONFIG)
            wrong = wrong or next((name for name in model if push.differs(name, pushed)), None)
    except RetargetError as error:
        raise PublishError(f"{where}, but it could not be verified: {error}; push again to verify it") from error
    if wrong:
        raise PublishError(f"{where}, but its {wrong} differs from the local one; push again")


def _explain(destination: Destination, error: BaseException) -> str | None:
    """Explain an error of the Hub client or its uploads, with advice."""
    name, message = destination.repository, one_line(error)
    if "Invalid metadata in README.md" in message:
        return f"the Hub refuses the {CARD}: {message}; correct its metadata, and push again"
    if getattr(getattr(error, "response", None), "status_code", None) == _MOVED:
        return f"other commits to '{name}' keep interfering; push again when they are done"
    if words := explain(error, name, destination.revision):
        return words
    if isinstance(error, (OSError, RuntimeError, ValueError)):
        return f"pushing to '{name}' failed: {message}; push again: uploaded files are not sent again"
    return None
