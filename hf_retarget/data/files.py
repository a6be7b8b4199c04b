"""Which files a dataset of a stranger may be read from: its own, and as the Hub has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from hf_retarget.errors import DataError
from hf_retarget.hub import GaveUp, ask, drop, fetch_whole, find_cause, is_trouble, is_whole
from hf_retarget.untrusted import read_bytes, read_json, split_card

BUILDERS = ("parquet", "arrow", "imagefolder", "webdataset")
"""What `datasets` may read images with. Of its other builders, some connect to databases or read any file."""


def check_card(card: Path, where: str) -> None:
    """Refuse a README.md of a dataset that sends `datasets` to files elsewhere, before `datasets` follows it."""
    try:
        entries, _ = split_card(read_bytes(card).decode())
    except FileNotFoundError:
        return
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise DataError(f"README.md of {where} cannot be read: {' '.join(str(error).split())}") from error
    for pattern in _patterns(entries.get("configs") if isinstance(entries, dict) else None):
        parts = pattern.replace("\\", "/").split("/")
        if ":" in pattern or parts[0] in ("", "~") or ".." in parts:
            raise DataError(f"README.md of {where} names the data files '{pattern}', which are not its own; correct it")


def check_saved(folder: Path) -> None:
    """Refuse what `save_to_disk` never wrote: splits and files that lie outside of the folder."""
    try:
        splits = read_json(folder / "dataset_dict.json")["splits"] if (folder / "dataset_dict.json").exists() else ["."]
        for split in splits:
            place = (folder / split).resolve()
            files = [each["filename"] for each in read_json(place / "state.json")["_data_files"]]
            for file in files:
                inside = (place / file).resolve()
                if not inside.is_relative_to(folder) or inside.suffix != ".arrow":
                    raise DataError(f"'{folder}' names the data file '{file}', which is not its own; save it again")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"'{folder}' is damaged: {type(error).__name__}: {error}; save it again") from error


def check_hub_card(name: str, revision: str | None, token: str | None) -> None:
    """The same for a dataset of the Hub; what is wrong besides with a dataset, `datasets` words better."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    def fetch() -> Path:
        return Path(
            ask(partial(hf_hub_download, name, "README.md", repo_type="dataset", revision=revision, token=token))
        )

    try:
        card = fetch_whole(fetch, f"README.md of dataset '{name}'")
    except (EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError):
        return
    except Exception as error:
        if isinstance(find_cause(error), GaveUp) or is_trouble(error):
            return  # out of reach: then only what was prepared before can be loaded
        raise
    check_card(card, f"dataset '{name}'")


def check_files(builder: Any, is_own: Callable[[str], bool], where: str) -> None:
    """Refuse a dataset that would be read by other means than as images, or from files that are not its own."""
    if builder.name not in BUILDERS:
        raise DataError(f"'{where}' is no dataset of images: `datasets` takes it for '{builder.name}'")
    for file in _files(builder):
        if not is_own(file):
            raise DataError(f"'{where}' names the data file '{file}', which is not its own; correct its README.md")


def hub_places(name: str) -> tuple[Path, ...]:
    """Where the files of a dataset of the Hub are on this machine: downloaded, and unpacked."""
    import datasets
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    own = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="dataset")
    return own, Path(datasets.config.EXTRACTED_DATASETS_PATH)


def drop_damaged(builder: Any, name: str) -> list[str]:
    """Compare the files that a dataset was made from with the hashes of the Hub; those that differ are dropped."""
    from huggingface_hub import try_to_load_from_cache

    damaged = []
    for file in _files(builder):
        revision, _, path = file.removeprefix(f"hf://datasets/{name}@").partition("/")
        found = try_to_load_from_cache(name, path, revision=revision, repo_type="dataset")
        if isinstance(found, str) and not is_whole(Path(found)):
            drop(Path(found))
            damaged.append(path)
    return damaged


def _files(builder: Any) -> list[str]:
    return [str(file) for files in (builder.config.data_files or {}).values() for file in files]


def _patterns(value: Any, key: str = "") -> Iterator[str]:
    """All texts that `datasets` takes for data files or folders."""
    if isinstance(value, str):
        if key in ("data_files", "data_dir", "path"):
            yield value
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from _patterns(each, str(name))
    elif isinstance(value, list):
        for each in value:
            yield from _patterns(each, key)
