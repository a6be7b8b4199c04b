"""Push a finished folder to the Hub: look what is there, send what is missing, one commit, and read it back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hf_retarget.errors import PublishError, RetargetError
from hf_retarget.hub import ask, explain
from hf_retarget.progress import SILENT, Progress
from hf_retarget.publish.contents import CARD, SAMPLES, fits, list_contents, list_weights
from hf_retarget.publish.destination import Destination, check_destination
from hf_retarget.publish.operations import is_same, make_operations
from hf_retarget.publish.readback import find_difference

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
