"""Tables of images through `datasets`: from the Hub, from parquet and arrow files, or as Python has them already."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from hf_retarget.data.files import check_card, check_files, check_hub_card, check_saved, drop_damaged, hub_places
from hf_retarget.data.labels import suggest
from hf_retarget.data.options import DataOptions
from hf_retarget.data.rows import TableRows
from hf_retarget.data.source import SPLITS, Source
from hf_retarget.errors import DataError
from hf_retarget.hub import GaveUp, ask, clean_token, describe_gate, explain, find_cause, token_was_refused

IMAGE_COLUMNS = ("image", "img", "images", "picture", "photo")
LABEL_COLUMNS = ("label", "labels", "fine_label", "class", "target", "category")
KINDS = {".parquet": "parquet", ".arrow": "arrow"}
_FOLDERS = ("imagefolder",)  # builders whose rows name files


def open_hub(reference: str, options: DataOptions, token: str | None = None) -> Source:
    """A dataset of the Hub, `org/name` or `org/name@revision`."""
    name, _, revision = reference.partition("@")
    asked, token = revision or options.revision, clean_token(token)
    failure = f"dataset '{name}' cannot be loaded from the Hub"
    try_loading(partial(check_hub_card, name, asked, token), failure)
    load = partial(_load_from_hub, name, options.config, asked, token)
    builder = try_loading(partial(ask_hub, load, name), failure, bars=sys.stderr.isatty())
    tables = _splits_of(try_loading(builder.as_dataset, failure))
    places = hub_places(name) if builder.name in _FOLDERS else ()  # the rows of a table must hold their pictures
    return open_tables(name, tables, options, revision=_commit(tables) or asked, places=places)


def find_builder(name: str, config: str | None, revision: str | None, token: str | None) -> Any:
    """What `datasets` would load a dataset of the Hub with, before anything but its card is downloaded."""
    from datasets import load_dataset_builder

    builder = load_dataset_builder(name, name=config, revision=revision, token=token)
    if builder.name == "cache":
        return builder  # the Hub is out of reach: what was prepared before
    check_files(builder, lambda file: file.startswith(f"hf://datasets/{name}@"), name)
    return builder


def _load_from_hub(name: str, config: str | None, revision: str | None, token: str | None) -> Any:
    """Download a dataset and prepare it; once more if bytes did not arrive as the Hub has them."""
    builder = find_builder(name, config, revision, token)
    there = Path(builder.cache_dir).exists()
    builder.download_and_prepare()
    if not there and drop_damaged(builder, name):
        builder.download_and_prepare(download_mode="force_redownload")
        if drop_damaged(builder, name):
            raise DataError(f"files of dataset '{name}' do not have the hashes that the Hub names; try again later")
    return builder


def open_files(paths: Sequence[Path], name: str, options: DataOptions) -> Source:
    """Parquet or arrow files, all of one kind, as one split."""
    from datasets import load_dataset

    kinds = {KINDS.get(path.suffix.casefold()) for path in paths}
    kind = kinds.pop()
    if kinds or kind is None:
        raise DataError(f"'{name}' is not all parquet or all arrow files; choose files of one kind")
    load = partial(load_dataset, kind, data_files=[str(path.resolve()) for path in paths])
    tables = _splits_of(try_loading(load, f"'{name}' cannot be read"))
    return open_tables(name, tables, options, places=tuple({path.resolve().parent for path in paths}))


def open_table_folder(folder: Path, options: DataOptions) -> Source:
    """A folder of parquet or arrow files whose names tell the splits, or one that `save_to_disk` wrote."""
    from datasets import load_dataset_builder, load_from_disk

    folder = folder.resolve()
    place = str(folder)
    saved = any((folder / name).exists() for name in ("state.json", "dataset_dict.json"))
    # `datasets` would join them all; a README may say what belongs together.
    if not saved and not (folder / "README.md").exists() and len(several := _datasets_in(folder)) > 1:
        raise DataError(f"'{folder}' holds several datasets: {', '.join(map(repr, several[:5]))}; give one of them")

    def prepare() -> Any:
        if saved:
            check_saved(folder)
            return load_from_disk(place)
        check_card(folder / "README.md", f"'{folder}'")
        builder = load_dataset_builder(place, name=options.config)
        check_files(builder, lambda file: Path(file).resolve().is_relative_to(folder), str(folder))
        builder.download_and_prepare()
        return builder.as_dataset()

    tables = _splits_of(try_loading(prepare, f"'{folder}' cannot be read"))
    return open_tables(folder.name, tables, options, places=(folder,))


def open_embedded(name: str, folder: Path, options: DataOptions) -> Source:
    """A dataset of the package: small, so it is read into memory, and nothing is written to a cache.

    Example:
        >>> from hf_retarget.data.embedded import EMBEDDED
        >>> len(open_embedded("fashion-mnist", EMBEDDED["fashion-mnist"], DataOptions()).splits["train"]())
        6000
    """
    import pyarrow.parquet as pq  # type: ignore[import-untyped]
    from datasets import Dataset

    tables = {path.stem: Dataset(pq.read_table(path)) for path in sorted(folder.glob("*.parquet"))}
    return open_tables(name, tables, options, places=())


def open_tables(
    name: str,
    tables: Mapping[str, Any],
    options: DataOptions,
    *,
    revision: str | None = None,
    places: tuple[Path, ...] | None = None,
) -> Source:
    """Splits that are `datasets.Dataset` already; rows may name files below `places` (anywhere, if None)."""
    splits = {split: partial(open_rows, table, options, places) for split, table in tables.items()}
    return Source(name, splits, revision)


def open_rows(table: Any, options: DataOptions, places: tuple[Path, ...] | None = None) -> TableRows:
    """Find the columns of images and of labels."""
    import datasets

    table = table.with_format(None)
    image, label = find_columns(table.features, options)
    names = tuple(table.features[label].names) if isinstance(table.features[label], datasets.ClassLabel) else None
    return TableRows(table.cast_column(image, datasets.Image(decode=False)), image, label, names, places)


def find_columns(features: Mapping[str, Any], options: DataOptions) -> tuple[str, str]:
    """The columns of images and of labels: those asked for, the only likely ones, or those with a usual name."""
    import datasets

    typed = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
    raw = [name for name, feature in features.items() if _could_be_images(feature)]
    image = _pick("image", options.image_column, list(features), [*typed, *raw], typed or raw, IMAGE_COLUMNS)
    named = [name for name, feature in features.items() if isinstance(feature, datasets.ClassLabel)]
    plain = [name for name, feature in features.items() if _could_be_labels(feature) and name != image]
    label = _pick("label", options.label_column, list(features), [*named, *plain], named or plain, LABEL_COLUMNS)
    return image, label


def _pick(
    kind: str, asked: str | None, columns: list[str], able: list[str], likely: list[str], usual: Sequence[str]
) -> str:
    """The column asked for if it is able to serve; else the only likely one, or the likely one with a usual name."""
    option = f"'{kind}_column' (--data-{kind}-column)"
    if asked is not None:
        if asked not in columns:
            raise DataError(f"there is no column '{asked}'; {suggest(asked, columns)}")
        if asked not in able:
            better = f"these could: {', '.join(map(repr, able))}" if able else "no other column does either"
            raise DataError(f"column '{asked}' does not hold {kind}s; {better}")
        return asked
    if len(likely) == 1:
        return likely[0]
    if (column := next((name for name in usual if name in likely), None)) is not None:
        return column
    if not likely:
        raise DataError(f"no column holds {kind}s; there are {', '.join(map(repr, columns))}")
    raise DataError(f"several columns could hold {kind}s: {', '.join(map(repr, likely))}; choose one with {option}")


def _could_be_images(feature: Any) -> bool:
    """Encoded images of a file that does not say so: bytes, or bytes and a path."""
    if isinstance(feature, dict):
        return set(feature) == {"bytes", "path"}
    return getattr(feature, "dtype", None) in ("binary", "large_binary")


def _could_be_labels(feature: Any) -> bool:
    dtype = str(getattr(feature, "dtype", ""))
    return type(feature).__name__ == "Value" and dtype.startswith(
        ("int", "uint", "float", "bool", "string", "large_st")
    )


def _datasets_in(folder: Path) -> list[str]:
    """The folders that hold tables, but for those that are named like splits."""
    files = [path for ending in KINDS for path in folder.rglob(f"*{ending}")]
    places = {path.parent.parent if path.parent.name.casefold() in SPLITS else path.parent for path in files}
    return sorted(place.relative_to(folder).as_posix() for place in places if place.is_relative_to(folder))


def _splits_of(loaded: Any) -> dict[str, Any]:
    if isinstance(loaded, Mapping):
        return dict(loaded)
    return {str(loaded.split or "train"): loaded}


def _commit(tables: Mapping[str, Any]) -> str | None:
    """The commit that was downloaded: `datasets` names the folder in its cache after it."""
    files = [Path(file["filename"]) for table in tables.values() for file in table.cache_files]
    return next((file.parent.name for file in files if re.fullmatch("[0-9a-f]{40}", file.parent.name)), None)


@contextmanager
def _bars(shown: bool) -> Iterator[None]:
    """`datasets` shows bars of its own, on a terminal or not; only a download is worth them, and only to a person."""
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    before = are_progress_bars_disabled()
    if not shown:
        disable_progress_bars()
    try:
        yield
    finally:
        if not before:
            enable_progress_bars()


def ask_hub(load: Callable[[], Any], name: str) -> Any:
    """Call `load`, again if need be; where the Hub itself is the matter, in our words.

    What a dataset lacks, `datasets` words better.

    Example:
        >>> ask_hub(lambda: "dataset", "org/name")
        'dataset'
    """
    try:
        return ask(load)
    except Exception as error:
        cause = find_cause(error)
        if isinstance(cause, GaveUp) or token_was_refused(cause):
            raise DataError(str(explain(cause, name, kind="dataset"))) from cause
        if "is a gated dataset" in str(error):  # the cause is hidden
            raise DataError(describe_gate(name)) from error
        raise


def try_loading(load: Callable[[], Any], failure: str, *, bars: bool = False) -> Any:
    """What `load` returns; whatever it raises becomes a DataError that begins with `failure`.

    Example:
        >>> try_loading(lambda: 1 / 0, "no data")
        Traceback (most recent call last):
        hf_retarget.errors.DataError: no data: division by zero
    """
    try:
        with _bars(bars):
            return load()
    except DataError:
        raise
    except Exception as error:  # datasets raises its own, the Hub's, pyarrow's and the network's errors
        told: BaseException = error
        while type(told).__name__ == "DatasetGenerationError" and told.__cause__ is not None:
            told = told.__cause__  # this one only says that there was an error
        reason = " ".join(str(told).split()).rstrip(".") or type(told).__name__
        raise DataError(f"{failure}: {reason[:500]}") from error
