"""Models on the Hub: the files that are needed, in the client's cache, all of one commit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from hf_retarget.errors import ModelError, RetargetError
from hf_retarget.hub import GaveUp, ask, explained, fetch_whole, is_whole
from hf_retarget.models.config import CONFIG, read_config
from hf_retarget.models.library import find_library
from hf_retarget.models.weights import INDEX, PICKLE, SAFE, pickle_only, shard_names, write_hollow
from hf_retarget.untrusted import read_bytes, split_card

_OTHER_FORMS = {SAFE: (INDEX, PICKLE), INDEX: (PICKLE,)}
"""Which files may hold the weights if one is not there."""


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
    repository: str, revision: str | None = None, *, config: bool = True, allow_pickle: bool = False, token: str | None
) -> tuple[Path, str | None]:
    """Download what is needed of a model, or find it in the cache; the folder it is in, and its commit.

    Only the first file is asked for by branch or tag: the others come from the commit that was answered with.
    """
    commit = None
    if config:
        found = _download(repository, CONFIG, revision, token)
        if found is None:
            raise ModelError(
                f"'{repository}' has no {CONFIG}, so it says not what model it is; say --arch for a local copy"
            )
        commit = _commit(found)
        _fetch_companions(repository, found, commit or revision, token)
    weights = _fetch_weights(repository, commit or revision, allow_pickle, token)
    return _snapshot(weights), _commit(weights)


def _fetch_companions(repository: str, config: Path, revision: str | None, token: str | None) -> list[Path]:
    """The other files that say something about a model; the cache remembers which of them a commit does not have."""
    from huggingface_hub import _CACHED_NO_EXIST, try_to_load_from_cache

    names = [
        name
        for name in find_library(read_config(config)).companions
        if try_to_load_from_cache(repository, name, revision=revision) is not _CACHED_NO_EXIST
    ]
    return [found for name in names if (found := _download(repository, name, revision, token)) is not None]


def _fetch_weights(repository: str, revision: str | None, allow_pickle: bool, token: str | None) -> Path:
    if found := _download(repository, SAFE, revision, token):
        return found
    if index := _download(repository, INDEX, revision, token):
        for name in shard_names(index):
            if _download(repository, name, _commit(index) or revision, token) is None:
                raise ModelError(f"'{repository}' lacks '{name}', which its {INDEX} names")
        return index
    if allow_pickle and (found := _download(repository, PICKLE, revision, token)):
        return found
    if not allow_pickle and _is_there(repository, PICKLE, revision, token):
        raise ModelError(pickle_only(repository, PICKLE))
    raise ModelError(f"'{repository}' has no {SAFE}; give a repository with weights for timm")


def fetch_card(repository: str, commit: str | None, token: str | None) -> Path | None:
    """The README.md of a model, beside its other files; None if it has none, or the Hub cannot be asked now."""
    from huggingface_hub import _CACHED_NO_EXIST, try_to_load_from_cache

    if try_to_load_from_cache(repository, "README.md", revision=commit) is _CACHED_NO_EXIST:
        return None  # it is known not to be there
    try:
        return _download(repository, "README.md", commit, token)
    except ModelError:
        return None  # a licence that is not known is no reason not to work


def read_card(card: Path) -> dict[str, Any]:
    """What the head of a README.md says; nothing if it has none, or one that cannot be read: anybody may write it."""
    try:
        entries, _ = split_card(read_bytes(card).decode())
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return entries if isinstance(entries, dict) else {}


def find_bases(entries: Mapping[str, Any]) -> tuple[str, ...]:
    """The models on the Hub of which a card says that this one was made from them.

    Example:
        >>> find_bases({"base_model": "timm/resnet18.a1_in1k"})
        ('timm/resnet18.a1_in1k',)
    """
    named = entries.get("base_model")
    several = named if isinstance(named, list) else [named]
    return tuple(each for each in several if isinstance(each, str))


def find_licence(entries: Mapping[str, Any]) -> dict[str, str]:
    """The entries of a card about the licence; one that is not the Hub's own goes by its name.

    Example:
        >>> find_licence({"license": "other", "license_name": "dinov3-license"})
        {'license': 'dinov3-license'}
    """
    named = entries.get("license")
    if named == "other" and entries.get("license_name"):
        named = entries["license_name"]
    found = {"license": named, "license_link": entries.get("license_link")}
    return {name: text for name, text in found.items() if isinstance(text, str)}


def _download(repository: str, name: str, revision: str | None, token: str | None) -> Path | None:
    """The file in the cache, compared with the hash that the Hub names; nothing if the repository does not have it."""
    absent = False

    def fetch() -> Path:
        nonlocal absent
        found = _fetch(repository, name, revision, token)
        absent = found is None
        return found or Path()

    try:
        path = fetch_whole(fetch, f"'{name}' of '{repository}'")
    except ModelError:
        raise
    except RetargetError as error:
        raise ModelError(str(error)) from error
    return None if absent else path


def _fetch(repository: str, name: str, revision: str | None, token: str | None) -> Path | None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError, RemoteEntryNotFoundError

    with _explained(repository, revision):
        try:
            return Path(ask(lambda: hf_hub_download(repository, name, revision=revision, token=token)))
        except RemoteEntryNotFoundError:
            return None
        except (LocalEntryNotFoundError, GaveUp) as error:
            if _cached(repository, revision, *_OTHER_FORMS.get(name, ())):
                return None  # the cache has the weights in another form
            if isinstance(error, GaveUp):
                raise
            raise ModelError(
                f"'{name}' of '{repository}' is not in the cache, and the Hub cannot be asked "
                "(offline, or no connection); download it once while there is a connection: "
                f"hf download {repository}{f' --revision {revision}' if revision else ''}"
            ) from error


def _is_there(repository: str, name: str, revision: str | None, token: str | None) -> bool:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import RemoteEntryNotFoundError

    if _cached(repository, revision, name):
        return True
    with _explained(repository, revision):
        try:
            ask(lambda: get_hf_file_metadata(hf_hub_url(repository, name, revision=revision), token=token))
        except RemoteEntryNotFoundError:
            return False
    return True


def _cached(repository: str, revision: str | None, *names: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return any(isinstance(try_to_load_from_cache(repository, name, revision=revision), str) for name in names)


@contextmanager
def _explained(repository: str, revision: str | None) -> Iterator[None]:
    from huggingface_hub.errors import HFValidationError

    try:
        with explained(ModelError, repository, revision):
            yield
    except ModelError as error:
        if not isinstance(error.__cause__, HFValidationError):
            raise
        reason = f"is neither a file or folder that exists nor a name the Hub could have: {error.__cause__}"
        raise ModelError(f"'{repository}' {reason}") from error


def _snapshot(path: Path) -> Path:
    return path.parent


def _commit(path: Path) -> str | None:
    folder = _snapshot(path)
    return folder.name if folder.parent.name == "snapshots" else None


def peek_model(
    repository: str,
    revision: str | None = None,
    *,
    config: bool = True,
    allow_pickle: bool = False,
    place: Path,
    token: str | None,
) -> tuple[str | None, int]:
    """Put into a folder what a model on the Hub is, but for the numbers; its commit, and how many bytes those are.

    Of the weights, only the headers come over the line; what is in the cache comes from there, and counts nothing.
    """
    commit = None
    if config:
        found = _download(repository, CONFIG, revision, token)
        if found is None:
            raise ModelError(f"'{repository}' has no {CONFIG}, so it says not what model it is")
        commit = _commit(found)
        (place / CONFIG).symlink_to(found)
        for companion in _fetch_companions(repository, found, commit or revision, token):
            (place / companion.name).symlink_to(companion)
    asked = commit or revision
    if (single := _peek(repository, SAFE, asked, place, token)) is not None:
        return commit or single[0], single[1]
    if index := _download(repository, INDEX, asked, token):
        (place / INDEX).symlink_to(index)
        shards = {name: _peek(repository, name, _commit(index) or asked, place, token) for name in shard_names(index)}
        if absent := next((name for name, shard in shards.items() if shard is None), None):
            raise ModelError(f"'{repository}' lacks '{absent}', which its {INDEX} names")
        return _commit(index), sum(shard[1] for shard in shards.values() if shard)
    if _is_there(repository, PICKLE, asked, token):
        unknown = f"of a pickle, nothing is known before the download: hf download {repository}, and check the folder"
        raise ModelError(f"'{repository}': {unknown}" if allow_pickle else pickle_only(repository, PICKLE))
    raise ModelError(f"'{repository}' has no {SAFE}; give a repository with weights")


def _peek(
    repository: str, name: str, revision: str | None, place: Path, token: str | None
) -> tuple[str | None, int] | None:
    """Put a weights file without its numbers into a folder; its commit, and the bytes of a download."""
    from huggingface_hub import (
        constants,
        get_hf_file_metadata,
        hf_hub_url,
        parse_safetensors_file_metadata,
        try_to_load_from_cache,
    )
    from huggingface_hub.errors import RemoteEntryNotFoundError, SafetensorsParsingError

    cached = try_to_load_from_cache(repository, name, revision=revision)
    if isinstance(cached, str) and is_whole(Path(cached)):
        (place / name).symlink_to(cached)
        return _commit(Path(cached)), 0
    if constants.HF_HUB_OFFLINE:
        if _cached(repository, revision, *_OTHER_FORMS.get(name, ())):
            return None  # the cache has the weights in another form
        raise ModelError(
            f"'{name}' of '{repository}' is not in the cache, and the Hub is not asked (HF_HUB_OFFLINE is set); "
            "check while there is a connection"
        )
    with _explained(repository, revision):
        try:
            about = ask(lambda: get_hf_file_metadata(hf_hub_url(repository, name, revision=revision), token=token))
            header = ask(lambda: parse_safetensors_file_metadata(repository, name, revision=revision, token=token))
        except RemoteEntryNotFoundError:
            return None
        except SafetensorsParsingError as error:
            raise ModelError(f"'{name}' of '{repository}' has a damaged header: {error}") from error
    end, size = max((each.data_offsets[1] for each in header.tensors.values()), default=0), about.size or 0
    if end > size:
        raise ModelError(f"'{name}' of '{repository}' is cut off: it has {size:,} bytes, its header speaks of {end:,}")
    write_hollow(place / name, header.tensors)
    return about.commit_hash, size
