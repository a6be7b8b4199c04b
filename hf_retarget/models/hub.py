"""Models on the Hub: the files that are needed, in the client's cache, all of one commit.

`snapshot_download` would fetch every form of the weights there is, and does not tell, offline, a file that is missing
in the cache from one that the repository does not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import yaml
from huggingface_hub import errors
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # exported without its type

from hf_retarget.errors import ModelError
from hf_retarget.hub import GaveUp, ask, explained, fetch_whole, is_whole
from hf_retarget.models.checkpoint import find_library
from hf_retarget.models.config import read_config
from hf_retarget.models.weights import INDEX, PICKLE, SAFE, pickle_only, shard_names, write_hollow
from hf_retarget.names import CARD, MODEL_CONFIG
from hf_retarget.untrusted import read_bytes, split_card

_OTHER_FORMS = {SAFE: (INDEX, PICKLE), INDEX: (PICKLE,)}
"""Which files may hold the weights if one is absent."""


def split_revision(reference: str) -> tuple[str, str | None]:
    """A Hub reference as repository and revision.

    Example:
        >>> split_revision("hf-hub:org/name@v2"), split_revision("org/name")
        (('org/name', 'v2'), ('org/name', None))
    """
    for scheme in ("hf-hub:", "hf_hub:", "hf://"):
        reference = reference.removeprefix(scheme)
    repository, _, revision = reference.partition("@")
    return repository, revision or None


def fetch_model(
    reference: str, *, config: bool = True, allow_pickle: bool = False, token: str | None, headers: Path | None = None
) -> HubModel:
    """Download what is needed of a model, or find it in the cache.

    With `headers`, an empty folder, only names, shapes and types of the weights are fetched, into that folder.
    """
    model = HubModel(reference, token, headers)
    if config:
        if (found := model.fetch(MODEL_CONFIG)) is None:
            raise ModelError(
                f"'{model.repository}' has no {MODEL_CONFIG}, so its architecture is unknown; "
                "download it, and say --arch"
            )
        for companion in find_library(read_config(found)).companions:
            model.fetch_optional(companion)
    model.fetch_weights(allow_pickle)
    if headers is None:
        with suppress(ModelError):  # an unknown licence is no reason to stop
            model.fetch_optional(CARD)
    return model


def read_card(card: Path) -> dict[str, Any]:
    """The metadata of a README.md; empty if there is none, or it cannot be read."""
    try:
        entries, _ = split_card(read_bytes(card).decode())
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return entries if isinstance(entries, dict) else {}


def find_bases(entries: Mapping[str, Any]) -> tuple[str, ...]:
    """The models on the Hub that a card names as the bases of its own."""
    named = entries.get("base_model")
    return tuple(each for each in (named if isinstance(named, list) else [named]) if isinstance(each, str))


def find_licence(entries: Mapping[str, Any]) -> dict[str, str]:
    """The entries of a card about the licence; one that the Hub does not know has a name of its own.

    Example:
        >>> find_licence({"license": "other", "license_name": "dinov3-license"})
        {'license': 'dinov3-license'}
    """
    named = entries.get("license")
    if named == "other" and entries.get("license_name"):
        named = entries["license_name"]
    found = {"license": named, "license_link": entries.get("license_link")}
    return {name: text for name, text in found.items() if isinstance(text, str)}


class _AbsentError(ModelError):
    """The repository does not have the file."""


class HubModel:
    """A model of the Hub, on this machine as far as it was fetched.

    The first file is asked for by branch or tag, all others by its commit.
    """

    def __init__(self, reference: str, token: str | None, headers: Path | None) -> None:
        self.repository, self.revision = split_revision(reference)
        self.token, self.headers = token, headers
        self.commit: str | None = None
        self.folder = headers or Path()
        self.remaining = 0
        """Bytes of weights that are still on the Hub only."""
        try:
            validate_repo_id(self.repository)
        except errors.HFValidationError as error:
            reason = f"is neither a file or folder that exists nor a name the Hub could have: {error}"
            raise ModelError(f"'{self.repository}' {reason}") from error

    @property
    def asked(self) -> str | None:
        return self.commit or self.revision

    def fetch(self, name: str) -> Path | None:
        """A file in the cache, compared with the hash that the Hub names; None if the repository does not have it."""
        try:
            path = fetch_whole(lambda: self._download(name), f"'{name}' of '{self.repository}'", ModelError)
        except _AbsentError:
            return None
        self._keep(name, path)
        return path

    def _keep(self, name: str, path: Path) -> None:
        """Take over a file of the cache: …/snapshots/commit/name."""
        self.commit = self.commit or path.parent.name
        if self.headers is None:
            self.folder = path.parent
        else:
            (self.headers / name).symlink_to(path)

    def fetch_optional(self, name: str) -> None:
        """Fetch a file unless the cache remembers that the commit does not have it."""
        if self._find_cached(name) is not huggingface_hub._CACHED_NO_EXIST:
            self.fetch(name)

    def fetch_weights(self, allow_pickle: bool) -> None:
        """Fetch one file, the shards of an index, or, on request, a pickle."""
        if self._fetch_tensors(SAFE):
            return
        if index := self.fetch(INDEX):
            for name in shard_names(index):
                if not self._fetch_tensors(name):
                    raise ModelError(f"'{self.repository}' lacks '{name}', which its {INDEX} names")
            return
        if allow_pickle and self.headers is None and self.fetch(PICKLE):
            return
        if not isinstance(self._find_cached(PICKLE), str) and self._ask_about(PICKLE) is None:
            raise ModelError(f"'{self.repository}' has no {SAFE}; give a repository with weights for timm")
        if not allow_pickle:
            raise ModelError(pickle_only(self.repository, PICKLE))
        raise ModelError(
            f"'{self.repository}': of a pickle, nothing is known before the download: "
            f"hf download {self.repository}, and check the folder"
        )

    def _download(self, name: str) -> Path:
        download = partial(huggingface_hub.hf_hub_download, revision=self.asked, token=self.token)
        with explained(ModelError, self.repository, self.asked):
            try:
                return Path(ask(lambda: download(self.repository, name)))
            except errors.RemoteEntryNotFoundError as error:
                raise _AbsentError(f"'{self.repository}' does not have '{name}'") from error
            except (errors.LocalEntryNotFoundError, GaveUp) as error:
                if self._has_other_form(name):
                    raise _AbsentError(f"the cache does not have '{name}'") from error
                if isinstance(error, GaveUp):
                    raise
                raise ModelError(
                    f"'{name}' of '{self.repository}' is not in the cache, and the Hub cannot be asked "
                    "(offline, or no connection); download it once while there is a connection: "
                    f"hf download {self.repository}{f' --revision {self.asked}' if self.asked else ''}"
                ) from error

    def _fetch_tensors(self, name: str) -> bool:
        """Fetch a file of weights, or its header only; False if the repository does not have it."""
        if self.headers is None:
            return self.fetch(name) is not None

        cached = self._find_cached(name)
        if isinstance(cached, str) and is_whole(Path(cached)):
            self._keep(name, Path(cached))
            return True
        if huggingface_hub.constants.is_offline_mode():
            if self._has_other_form(name):
                return False
            raise ModelError(
                f"'{name}' of '{self.repository}' is not in the cache, and the Hub is not asked (HF_HUB_OFFLINE is "
                "set); check while there is a connection"
            )
        if (about := self._ask_about(name)) is None:
            return False
        with explained(ModelError, self.repository, self.asked):
            # `get_safetensors_metadata` would ask for the names of the files again.
            read = partial(huggingface_hub.parse_safetensors_file_metadata, revision=self.asked, token=self.token)
            try:
                tensors = ask(lambda: read(self.repository, name)).tensors
            except errors.SafetensorsParsingError as error:
                raise ModelError(f"'{name}' of '{self.repository}' has a damaged header: {error}") from error
        end, size = max((each.data_offsets[1] for each in tensors.values()), default=0), about.size or 0
        if end > size:
            raise ModelError(
                f"'{name}' of '{self.repository}' is cut off: it has {size:,} bytes, and its header {end:,}"
            )
        write_hollow(self.headers / name, tensors)
        self.commit, self.remaining = self.commit or about.commit_hash, self.remaining + size
        return True

    def _ask_about(self, name: str) -> huggingface_hub.HfFileMetadata | None:
        """Size and commit of a file; None if the repository does not have it."""
        url = huggingface_hub.hf_hub_url(self.repository, name, revision=self.asked)
        with explained(ModelError, self.repository, self.asked):
            try:
                return ask(lambda: huggingface_hub.get_hf_file_metadata(url, token=self.token))
            except errors.RemoteEntryNotFoundError:
                return None

    def _has_other_form(self, name: str) -> bool:
        """Whether the cache has the weights in another form."""
        return any(isinstance(self._find_cached(other), str) for other in _OTHER_FORMS.get(name, ()))

    def _find_cached(self, name: str) -> Any:
        return huggingface_hub.try_to_load_from_cache(self.repository, name, revision=self.asked)
