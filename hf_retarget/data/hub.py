"""Datasets on the Hub, loaded by `datasets`: only their own files, verified by hash."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.file_download import repo_folder_name

from hf_retarget import hub
from hf_retarget.data.files import EMBEDDED, check_card, check_files, data_files, loading
from hf_retarget.data.labels import suggest
from hf_retarget.data.tables import Source, open_tables
from hf_retarget.errors import DataError
from hf_retarget.recipe.options import DataOptions


def open_hub(reference: str, options: DataOptions, token: str | None = None) -> Source:
    """Download a dataset of the Hub, `org/name` or `org/name@revision`."""
    import datasets

    name, builder = find_on_hub(reference, options, token, download=True)
    with loading(f"dataset '{name}' cannot be loaded from the Hub"):
        tables = builder.as_dataset()
    places: tuple[Path, ...] = ()  # rows of a table must contain their images
    if builder.name == "imagefolder":  # rows of an image folder name downloaded or unpacked files
        own = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="dataset")
        places = own, Path(datasets.config.EXTRACTED_DATASETS_PATH)
    return open_tables(name, tables, options, revision=builder.hash, places=places)


def find_on_hub(
    reference: str, options: DataOptions, token: str | None = None, *, download: bool = False
) -> tuple[str, Any]:
    """Return the name of a dataset and its builder, which knows splits, features and sizes before the download."""
    from datasets import load_dataset_builder

    name, _, asked = reference.partition("@")
    revision, token = asked or options.revision, hub.clean_token(token)

    def find() -> Any:
        builder = load_dataset_builder(name, name=options.config, revision=revision, token=token)
        if builder.name != "cache":  # "cache": the Hub cannot be reached, and a prepared copy is used
            check_files(builder, lambda file: file.startswith(f"hf://datasets/{name}@"), name)
        if download:
            _download(builder, name)
        return builder

    try:
        bars = download and sys.stderr.isatty()
        with loading(f"dataset '{name}' cannot be loaded from the Hub", bars=bars):
            try:
                _check_card(name, revision, token)
                return name, hub.ask(find)
            except Exception as error:  # `datasets` explains its own errors better
                cause = hub.find_cause(error)
                if isinstance(cause, hub.GaveUp | hub.UnknownHost) or hub.token_was_refused(cause):
                    raise DataError(str(hub.explain(cause, name, kind="dataset"))) from cause
                if "is a gated dataset" in str(error):  # raised without a cause
                    raise DataError(hub.describe_gate(name)) from error
                raise
    except DataError as error:
        if revision or not isinstance(error.__cause__, FileNotFoundError | ConnectionError):
            raise  # the dataset exists, but lacks what was asked for
        here = f"nor is it a local file or folder, or an embedded dataset{suggest(name, list(EMBEDDED))}"
        raise DataError(f"{error}; {here}") from error


def _download(builder: Any, name: str) -> None:
    """Download and prepare a dataset; once more if any file does not have the Hub's hash."""
    prepared = Path(builder.cache_dir).exists()
    builder.download_and_prepare()
    if not prepared and _drop_damaged(builder, name):
        builder.download_and_prepare(download_mode="force_redownload")
        if _drop_damaged(builder, name):
            raise DataError(f"files of dataset '{name}' do not have the hashes given by the Hub; try again later")


def _drop_damaged(builder: Any, name: str) -> bool:
    """Remove downloaded files that do not have the Hub's hash; return whether there were any."""
    dropped = False
    for file in data_files(builder):
        revision, _, path = file.removeprefix(f"hf://datasets/{name}@").partition("/")
        found = try_to_load_from_cache(name, path, revision=revision, repo_type="dataset")
        if isinstance(found, str) and not hub.is_whole(Path(found)):
            hub.drop(Path(found))
            dropped = True
    return dropped


def _check_card(name: str, revision: str | None, token: str | None) -> None:
    """Refuse a README.md that refers to other files. Other problems of a dataset are left to `datasets`."""
    download = partial(hf_hub_download, name, "README.md", repo_type="dataset", revision=revision, token=token)
    try:
        card = hub.fetch_whole(lambda: Path(hub.ask(download)), f"README.md of dataset '{name}'")
    except (EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError):
        return
    except Exception as error:
        if isinstance(hub.find_cause(error), hub.GaveUp) or hub.is_trouble(error):
            return  # the Hub cannot be reached: only a prepared copy can be loaded
        raise
    check_card(card, f"dataset '{name}'")
