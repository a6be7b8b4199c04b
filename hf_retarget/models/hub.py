"""Models on the Hub: downloads the files that are needed, all of one commit, into the client's cache.

`snapshot_download` would fetch the weights in every format there is.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import yaml
from huggingface_hub import errors
from huggingface_hub.constants import is_offline_mode
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # exported without their types
    build_hf_headers,
    hf_raise_for_status,
    validate_repo_id,
)

from hf_retarget.errors import ModelError
from hf_retarget.hub import UnknownHost, ask, explain, explained, fetch_whole, find_cause, is_trouble, is_whole
from hf_retarget.models.checkpoint import find_library
from hf_retarget.models.config import read_config
from hf_retarget.models.weights import INDEX, PICKLE, SAFE, find_tensors, pickle_only, shard_names, write_hollow
from hf_retarget.names import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CARD, MODEL_CONFIG, PORT
from hf_retarget.untrusted import MAX_CONFIG_BYTES, read_bytes, split_card

_TIMEOUT = 10.0  # seconds
_BEGINNING = 100_001  # bytes of a weight file, enough for most headers; as many as the client requests


def split_revision(reference: str) -> tuple[str, str | None]:
    """Split a Hub reference into repository and revision.

    Example:
        >>> split_revision("hf-hub:org/name@v2"), split_revision("org/name")
        (('org/name', 'v2'), ('org/name', None))
    """
    for scheme in ("hf-hub:", "hf_hub:", "hf://"):
        reference = reference.removeprefix(scheme)
    repository, _, revision = reference.partition("@")
    return repository, revision or None


def fetch_model(
    reference: str,
    *,
    config: bool = True,
    allow_pickle: bool = False,
    token: str | None,
    headers: Path | None = None,
    optional: bool = False,
) -> HubModel:
    """Download the files of a model, or find them in the cache.

    With `headers`, an empty folder, only the headers of the weights are fetched, into that folder; with `optional`,
    only if there are safetensors.
    """
    model = HubModel(reference, token, headers)
    if holds_adapter(model.sizes):
        model.fetch(ADAPTER_CONFIG)
        config = MODEL_CONFIG in model.sizes
    if config:
        if (found := model.fetch(MODEL_CONFIG)) is None:
            advice = "so its architecture is unknown; download it, and give --arch"
            raise model.absent(MODEL_CONFIG, f"'{model.repository}' has no {MODEL_CONFIG}, {advice}")
        for companion in find_library(read_config(found)).companions:
            model.fetch(companion)
    if not optional or {SAFE, INDEX} & set(model.sizes):
        model.fetch_weights(allow_pickle)
    model.fetch(PORT)
    if headers is None:
        with suppress(ModelError):  # the licence is optional
            model.fetch(CARD)
    return model


def holds_adapter(names: Container[str]) -> bool:
    """Whether the files of a folder or repository are those of an adapter, without a whole model.

    Example:
        >>> holds_adapter(["adapter_config.json"]), holds_adapter(["adapter_config.json", "model.safetensors"])
        (True, False)
    """
    return ADAPTER_CONFIG in names and SAFE not in names and INDEX not in names


def no_adapter_weights(where: str) -> str:
    """The message for an adapter without safetensors; its pickle is never read."""
    return f"the adapter '{where}' has no {ADAPTER_WEIGHTS}; save it again with PEFT, which writes safetensors"


def read_card(card: Path) -> dict[str, Any]:
    """The metadata of a README.md; empty if there is none or it cannot be read."""
    try:
        entries, _ = split_card(read_bytes(card).decode())
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return entries if isinstance(entries, dict) else {}


def find_bases(entries: Mapping[str, Any]) -> tuple[str, ...]:
    """The base models that a card names."""
    named = entries.get("base_model")
    return tuple(each for each in (named if isinstance(named, list) else [named]) if isinstance(each, str))


def find_licence(entries: Mapping[str, Any]) -> dict[str, str]:
    """The entries of a card about the licence; a licence unknown to the Hub is called by its `license_name`.

    Example:
        >>> find_licence({"license": "other", "license_name": "dinov3-license"})
        {'license': 'dinov3-license'}
    """
    named = entries.get("license")
    if named == "other" and entries.get("license_name"):
        named = entries["license_name"]
    found = {"license": named, "license_link": entries.get("license_link")}
    return {name: text for name, text in found.items() if isinstance(text, str)}


class HubModel:
    """One commit of a model on the Hub, and the part of it that has been fetched.

    Its files are listed once; if the Hub cannot be reached, those in the cache are used. The first file is downloaded
    by branch or tag, which the cache then resolves, and all others by commit.
    """

    def __init__(self, reference: str, token: str | None, headers: Path | None) -> None:
        self.repository, self.revision = split_revision(reference)
        self.api, self.headers = huggingface_hub.HfApi(token=token), headers
        self.folder = headers or Path()
        self.hashes: dict[str, str] = {}
        """The sha256 of files according to the Hub, which has those of all large ones."""
        self.remaining = 0
        """Bytes of weights that have not been downloaded."""
        self.card: Mapping[str, Any] = {}
        """The metadata of its README.md, if the Hub was asked."""
        try:
            validate_repo_id(self.repository)
        except errors.HFValidationError as error:
            reason = f"is neither an existing file or folder nor a valid Hub id: {error}"
            raise ModelError(f"'{self.repository}' {reason}") from error
        self.commit, self.sizes, self.in_reach = self._look()
        self._asked = self.revision if self.in_reach else self.commit

    def _look(self) -> tuple[str, dict[str, int], bool]:
        """The commit, the sizes of its files, and whether the Hub could be reached."""
        cached: Path | None = None  # the cache's folder …/snapshots/commit, with some or all of the files
        with suppress(errors.LocalEntryNotFoundError):
            find = partial(self.api.snapshot_download, revision=self.revision, local_files_only=True)
            cached = Path(find(self.repository))
        look = partial(self.api.model_info, revision=self.revision, files_metadata=True)
        with explained(ModelError, self.repository, self.revision, words=self._explain):
            try:
                # With the files in the cache, do not wait for an unavailable Hub.
                found = look(self.repository, timeout=_TIMEOUT) if cached else ask(lambda: look(self.repository))
                self.hashes = {each.rfilename: each.lfs.sha256 for each in found.siblings or () if each.lfs}
                self.card = dict(vars(found.card_data)) if found.card_data else {}
                return str(found.sha), {each.rfilename: each.size or 0 for each in found.siblings or ()}, True
            except Exception as error:
                if cached and (is_offline_mode() or is_trouble(error)):
                    sizes = {path.name: path.stat().st_size for path in cached.iterdir() if path.is_file()}
                    return cached.name, sizes, False
                if is_offline_mode():
                    raise self._not_cached(f"'{self.repository}'") from error
                raise

    def _explain(self, error: BaseException) -> str | None:
        found = explain(error, self.repository, self.revision)
        unknown = isinstance(find_cause(error), UnknownHost)
        return f"{found}. There is no folder '{self.repository}' here, either" if unknown else found

    def _not_cached(self, what: str) -> ModelError:
        return ModelError(
            f"{what} is not in the cache, and the Hub cannot be reached (offline, or no connection); download it once "
            f"while there is a connection: hf download {self.repository}"
            f"{f' --revision {self.revision}' if self.revision else ''}"
        )

    def absent(self, name: str, otherwise: str) -> ModelError:
        """The error for a missing file."""
        return ModelError(otherwise) if self.in_reach else self._not_cached(f"'{name}' of '{self.repository}'")

    def fetch(self, name: str) -> Path | None:
        """Download a file, or find it in the cache, verified by hash; None if the repository does not have it."""
        if name not in self.sizes:
            return None
        path = fetch_whole(lambda: self._download(name), f"'{name}' of '{self.repository}'", ModelError)
        self.commit = self._asked = path.parent.name
        self._keep(name, path)
        return path

    def _keep(self, name: str, path: Path) -> None:
        if self.headers is None:
            self.folder = path.parent
        else:
            (self.headers / name).symlink_to(path)

    def _download(self, name: str) -> Path:
        download = partial(self.api.hf_hub_download, revision=self._asked)
        with explained(ModelError, self.repository, self.revision):
            try:
                return Path(ask(lambda: download(self.repository, name)))
            except errors.LocalEntryNotFoundError as error:
                answered = error.__cause__  # the client does not tell a refusal from a lost connection
                has_answer = getattr(answered, "response", None) is not None
                if answered is not None and (has_answer or isinstance(answered, errors.FileMetadataError)):
                    raise answered from None
                raise self._not_cached(f"'{name}' of '{self.repository}'") from error

    def fetch_weights(self, allow_pickle: bool) -> None:
        """Fetch the weights: a single file, the shards of an index, an adapter, or, on request, a pickle."""
        if holds_adapter(self.sizes):
            names = [ADAPTER_WEIGHTS]
            if ADAPTER_WEIGHTS not in self.sizes:
                raise self.absent(ADAPTER_WEIGHTS, no_adapter_weights(self.repository))
        elif SAFE in self.sizes:
            names = [SAFE]
        elif index := self.fetch(INDEX):
            names = shard_names(index)
        elif PICKLE not in self.sizes:
            raise self.absent(SAFE, f"'{self.repository}' has no {SAFE}; choose a repository that has one")
        elif not allow_pickle:
            revision = f"@{self.revision}" if self.revision else ""
            raise ModelError(pickle_only(f"{self.repository}{revision}", PICKLE))
        elif self.headers is not None:
            raise ModelError(
                f"'{self.repository}' has only a pickle, which must be downloaded to be checked: "
                f"hf download {self.repository}, then check the folder"
            )
        else:
            names = [PICKLE]
        for name in names:
            if name not in self.sizes:
                raise self.absent(name, f"'{self.repository}' lacks '{name}', which its {INDEX} lists")
            if self.headers is None:
                self.fetch(name)
            else:
                self._fetch_header(name, self.headers / name)

    def is_hollow(self, path: Path) -> bool:
        """Whether a file has only its header, while its values are on the Hub."""
        return self.headers is not None and path.parent == self.headers and not path.is_symlink()

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Read some bytes of a file on the Hub; raise ModelError if it cannot be read in parts."""
        url = huggingface_hub.hf_hub_url(self.repository, name, revision=self.commit, endpoint=self.api.endpoint)
        headers = {**build_hf_headers(token=self.api.token), "Range": f"bytes={start}-{end - 1}"}

        def read() -> bytes:
            with huggingface_hub.get_session().stream("GET", url, headers=headers, follow_redirects=True) as answer:
                hf_raise_for_status(answer)
                if answer.status_code != 206 and start:  # the response is the whole file
                    raise ModelError(f"'{self.repository}' cannot be read in parts")
                found = b""
                for part in answer.iter_bytes():
                    found += part
                    if len(found) >= end - start:
                        break
                return found[: end - start]

        with explained(ModelError, self.repository, self.revision):
            return ask(read)

    def _fetch_header(self, name: str, place: Path) -> None:
        """Provide a weight file: the cached one, or one with the same header and no values."""
        cached = huggingface_hub.try_to_load_from_cache(self.repository, name, revision=self.commit)
        if isinstance(cached, str) and is_whole(Path(cached)):
            self._keep(name, Path(cached))
            return
        # Not the client's `parse_safetensors_file_metadata`: it reads the whole file if ranges are ignored, and does
        # not validate the header.
        what, size = f"'{name}' of '{self.repository}'", self.sizes[name]
        raw = self.read_range(name, 0, min(size, _BEGINNING))
        length = 8 + int.from_bytes(raw[:8], "little")
        try:
            if not 8 <= length <= min(size, MAX_CONFIG_BYTES):
                raise ValueError(f"it claims {length:,} bytes")
            raw = raw if length <= len(raw) else self.read_range(name, 0, length)
            end = write_hollow(place, raw[:length])
            if end > size:
                raise ModelError(f"{what} is cut off: it has {size:,} bytes, not the {end:,} of its header")
            find_tensors([place])
        except (ValueError, TypeError, LookupError, AttributeError, OSError, RecursionError) as error:
            raise ModelError(f"{what} has a damaged header: {error}") from error
        self.remaining += size
