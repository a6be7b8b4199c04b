"""Every supported form of data, and every way in which it can be invalid."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Subset

from hf_retarget.data import EMBEDDED, Preprocess, load_data
from hf_retarget.data.tables import open_image
from hf_retarget.errors import DataError
from hf_retarget.recipe.options import DataOptions

SHARED = Path(__file__).parents[3] / "shared" / "data"
DEFAULT = DataOptions()


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def load(preprocess):
    def load(reference, options=DEFAULT, **others):
        return load_data(reference, options, preprocess, **others)

    return load


def pictures(split):
    """The numbers of the images in a split."""
    return [split.image(number).convert("RGB").getpixel((0, 0))[0] for number in range(len(split))]


def check_thirds(data):
    """In all of these tests, image k is of class k % 3."""
    for split in (data.train, data.validation, data.test):
        assert len(split)
        assert [number % 3 for number in pictures(split)] == split.targets.tolist()
    everything = pictures(data.train) + pictures(data.validation)
    assert len(set(everything)) == len(everything)


# --- where data comes from


def test_embedded_images_are_loaded():
    data = load_data("fashion-mnist", DEFAULT, Preprocess.of({"input_size": (1, 28, 28)}))
    assert (data.classes, len(data.train), len(data.validation), len(data.test)) == (10, 5400, 600, 1500)
    assert data.labels[0] == "T-shirt/top"
    assert torch.bincount(data.test.targets).tolist() == [150] * 10
    assert torch.bincount(data.train.targets).tolist() == [540] * 10
    images, labels = next(data.train.batches(128, seed=0))
    assert images.shape == (128, 1, 28, 28)
    assert labels.shape == (128,)
    assert sum(len(labels) for _, labels in data.test.batches(256)) == 1500
    assert data.test.broken == {}
    assert data.notes == ()


def test_embedded_data_is_small_and_licensed():
    for folder in EMBEDDED.values():
        assert sum(path.stat().st_size for path in folder.iterdir()) < 5e6
        assert "Permission is hereby granted" in (folder / "NOTICE").read_text(encoding="utf-8")


def test_a_folder_with_splits(load, image_folder):
    for number in range(30):
        image_folder(f"train/{'abc'[number % 3]}", 1, number)
        folder = image_folder(f"val/{'abc'[number % 3]}", 1, number + 60)
    data = load(folder)
    check_thirds(data)
    assert data.labels == ("a", "b", "c")
    assert (len(data.train), len(data.validation), len(data.test)) == (27, 3, 30)
    assert sorted(pictures(data.test)) == list(range(60, 90))
    assert data.notes == ("there is no split named test: 'val' is used instead",)


def test_a_folder_with_classes_only(load, image_folder):
    for number in range(30):
        folder = image_folder("abc"[number % 3], 1, number)
    (folder / "b" / "notes.txt").write_text("not an image")
    (folder / "b" / ".hidden").write_text("")
    data = load(str(folder))
    check_thirds(data)
    assert (len(data.train), len(data.validation), len(data.test)) == (24, 3, 3)
    assert data.notes == (
        "left out 1 file in non-image formats (first: b/notes.txt)",
        "no test split: 10% of 'train' held out (3 images)",
    )


def test_files_that_are_not_images_are_reported(load, image_folder):
    folder = image_folder("a", 30) and image_folder("b", 30)
    (folder / "a" / "000.png").write_text("no picture at all")
    (folder / "b" / "007.png").write_bytes((folder / "b" / "007.png").read_bytes()[:40])
    data = load(folder)
    for split in (data.train, data.validation, data.test):
        list(split.batches(8))
    found = [complaint for split in (data.train, data.validation, data.test) for complaint in split.broken.values()]
    assert sorted(complaint.partition(":")[0] for complaint in found) == ["a/000.png", "b/007.png"]


@pytest.mark.parametrize("names", [("ant", "bee", "cat"), None])
def test_a_folder_of_parquet(load, table, tmp_path, names):
    place = tmp_path / "tables"
    place.mkdir()
    table(60, names).to_parquet(place / "train-00000-of-00001.parquet")
    table(21, names).to_parquet(place / "test-00000-of-00001.parquet")
    data = load(place)
    check_thirds(data)
    assert (len(data.train), len(data.validation), len(data.test)) == (54, 6, 21)
    assert data.labels == names
    assert data.classes == 3


def test_one_parquet_file_and_many(load, table, tmp_path):
    table(30).to_parquet(tmp_path / "a.parquet")
    table(60).select(range(30, 60)).to_parquet(tmp_path / "b.parquet")
    check_thirds(load(tmp_path / "a.parquet"))
    data = load(str(tmp_path / "*.parquet"))
    check_thirds(data)
    assert len(data.train) + len(data.validation) + len(data.test) == 60


@pytest.mark.parametrize(
    "names", [("train-00000-of-00002", "train-00001-of-00002", "test"), ("train/0", "train/1", "validation/0")]
)
def test_files_of_splits_by_a_pattern(load, table, tmp_path, names):
    for name, part in zip(names, (range(30), range(30, 60), range(21)), strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        table(60).select(part).to_parquet(tmp_path / f"{name}.parquet")
    data = load(str(tmp_path / "**" / "*.parquet"))
    check_thirds(data)
    assert (len(data.train), len(data.validation), len(data.test)) == (54, 6, 21)
    table(9).to_parquet(tmp_path / "more.parquet")
    with pytest.raises(DataError, match=r"files named after splits .* and others \('more.parquet'\)"):
        load(str(tmp_path / "**" / "*.parquet"))


def test_parquet_written_by_other_tools(load, tmp_path, table):
    import pyarrow as pa
    import pyarrow.parquet as pq

    cells = table(30).cast_column("image", datasets.Image(decode=False))[:]
    plain = pa.table({"img": [cell["bytes"] for cell in cells["image"]], "target": cells["label"]})
    pq.write_table(plain, tmp_path / "plain.parquet")
    check_thirds(load(tmp_path / "plain.parquet"))


def test_arrow_files_and_saved_datasets(load, table, tmp_path):
    table(30).save_to_disk(tmp_path / "one")
    check_thirds(load(tmp_path / "one"))
    check_thirds(load(next((tmp_path / "one").glob("*.arrow"))))
    datasets.DatasetDict(train=table(30), test=table(21)).save_to_disk(tmp_path / "two")
    data = load(tmp_path / "two")
    check_thirds(data)
    assert len(data.test) == 21


def test_datasets_objects(load, table):
    check_thirds(load(table()))
    check_thirds(load(table().with_format("torch")))
    data = load(datasets.DatasetDict(train=table(), validation=table(21), test=table(12)))
    check_thirds(data)
    assert len(data.test) == 12


def test_a_selection_of_a_dataset(load, table):
    check_thirds(load(table().shuffle(seed=0).select(range(40))))


def test_sequences_and_torch_datasets(load, pairs):
    check_thirds(load(pairs))
    check_thirds(load(Subset(pairs, range(5, 45))))
    data = load({"train": pairs, "test": pairs[:21]})
    check_thirds(data)
    assert len(data.test) == 21


def test_labels_of_a_torch_dataset_are_found_without_decoding(load, pairs):
    class Pairs:
        classes = ("ant", "bee", "cat")
        targets = torch.tensor([label for _, label in pairs])
        asked = 0

        def __len__(self):
            return len(pairs)

        def __getitem__(self, number):
            self.asked += 1
            return pairs[number]

    given = Pairs()
    rows = load(Subset(given, range(30))).train.rows
    before = given.asked
    assert rows.names == given.classes
    assert rows.labels == [number % 3 for number in range(30)]
    assert given.asked == before == 32  # one to see whether it is labelled, one for its size, all for the fingerprint


@pytest.mark.parametrize("kind", ["array", "floats", "tensor", "gray"])
def test_arrays_and_tensors(load, pairs, kind, numbers):
    def convert(image):
        array = np.asarray(image)
        if kind == "gray":
            return array[..., 0]
        if kind == "array":
            return array
        tensor = torch.from_numpy(array.copy()).permute(2, 0, 1)
        return tensor if kind == "tensor" else tensor / 255

    data = load([(convert(image), label) for image, label in pairs])
    assert [number % 3 for number in pictures(data.train)] == data.train.targets.tolist()


def test_orientation_is_respected(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (10, 4)).save(tmp_path / "turned.jpg", exif=exif)
    assert open_image((tmp_path / "turned.jpg").read_bytes()).size == (4, 10)


@pytest.mark.skipif(not SHARED.exists(), reason="the project's shared images are not there")
def test_real_photographs(load):
    preprocess = Preprocess.of({"input_size": (3, 64, 64)})
    data = load_data(SHARED / "flowers", DataOptions(limit=60), preprocess)
    assert data.labels == ("daisy", "dandelion", "roses", "sunflowers", "tulips")
    images, _ = next(data.train.batches(16, seed=0, augment=True))
    assert images.shape == (16, 3, 64, 64)
    assert images.isfinite().all()
    assert images.std() > 0.1


# --- options


def test_selected_classes_are_renumbered(load, table):
    data = load(table(), DataOptions(classes=("cat", "ant")))
    assert (data.labels, data.classes) == (("cat", "ant"), 2)
    for split in (data.train, data.validation, data.test):
        assert [{2: 0, 0: 1}[number % 3] for number in pictures(split)] == split.targets.tolist()


def test_limit_keeps_class_shares(load, table):
    data = load({"train": table(90), "test": table(60)}, DataOptions(limit=30))
    assert (len(data.train), len(data.validation), len(data.test)) == (27, 3, 30)
    assert torch.bincount(data.test.targets).tolist() == [10, 10, 10]


def test_the_seed_determines_held_out_images(load, table):
    first, again, other = (load(table(), DataOptions(seed=seed)) for seed in (0, 0, 1))
    assert pictures(first.validation) == pictures(again.validation)
    assert pictures(first.test) == pictures(again.test)
    assert pictures(first.validation) != pictures(other.validation)


def test_no_validation(load, table):
    assert len(load(table(), DataOptions(validation=0.0)).validation) == 0


def test_splits_and_columns_by_name(load, table):
    given = {"a": table(30), "b": table(21)}
    with pytest.raises(DataError, match=r"has the splits 'a', 'b'; choose .* 'train_split'"):
        load(given)
    data = load(given, DataOptions(train_split="b", test_split="a"))
    assert (len(data.test), len(data.train)) == (30, 19)
    both = table(30).add_column("fine", [number % 2 for number in range(30)])
    assert load(both, DataOptions(label_column="fine")).classes == 2


def test_an_empty_reference_falls_back_to_the_options(load):
    assert load("", DataOptions(reference="fashion-mnist", limit=20)).name == "fashion-mnist"


# --- the model's labels


def test_labels_are_matched_to_the_model_by_name(load, table):
    data = load(table(), model_labels=["Cat", "ant", "bee"])
    assert data.labels == ("Cat", "ant", "bee")
    assert [(number % 3 + 1) % 3 for number in pictures(data.train)] == data.train.targets.tolist()


def test_labels_unlike_the_model_are_refused(load, table):
    with pytest.raises(DataError, match="only the data has 'cat'; only the model has 'dog'"):
        load(table(), model_labels=["ant", "bee", "dog"])


def test_numbered_labels_take_the_names_of_the_model(load, table):
    data = load(table(names=None), model_labels=["x", "y", "z", "w"])
    assert (data.labels, data.classes) == (("x", "y", "z", "w"), 4)
    with pytest.raises(DataError, match="label 2 is out of range: the model has 2 labels"):
        load(table(names=None), model_labels=["x", "y"])


# --- the fingerprint


def test_the_fingerprint_changes_with_content_and_options(load, image_folder, preprocess, tmp_path):
    image_folder("a", 20)
    folder = image_folder("b", 20, 20)
    first = load(folder).fingerprint
    shutil.copytree(folder, tmp_path / "copy")
    assert load(tmp_path / "copy").fingerprint == first
    assert load(folder, DataOptions(seed=1)).fingerprint != first
    assert load_data(folder, DEFAULT, replace(preprocess, crop_pct=0.9)).fingerprint != first
    shutil.copy(folder / "a" / "001.png", folder / "a" / "002.png")
    changed = load(folder).fingerprint
    assert changed != first
    os.rename(folder / "a" / "003.png", folder / "b" / "003.png")
    assert load(folder).fingerprint not in (first, changed)


def test_the_fingerprint_of_tables_and_items(load, table, pairs):
    assert load(table()).fingerprint == load(table()).fingerprint != load(table(57)).fingerprint
    other = [(Image.new("RGB", (8, 8), "red"), pairs[0][1]), *pairs[1:]]
    assert load(pairs).fingerprint == load(list(pairs)).fingerprint != load(other).fingerprint


# --- errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (DataOptions(label_column="labl"), "no column 'labl'; did you mean 'label'"),
        (DataOptions(image_column="label"), "column 'label' does not hold images; candidates: 'image'"),
        (DataOptions(label_column="image"), "column 'image' does not hold labels; candidates: 'label'"),
        (DataOptions(test_split="tets"), "no split 'tets'; did you mean 'test'"),
        (DataOptions(train_split="test", test_split="test"), "cannot be both"),
        (DataOptions(test_split="train"), "'train' cannot be both"),
        (DataOptions(classes=("ant",)), "of only one class"),
        (DataOptions(classes=("ant", "be")), "no class 'be'; did you mean 'bee'"),
    ],
)
def test_options_that_do_not_apply_are_refused(load, table, options, message):
    with pytest.raises(DataError, match=message):
        load({"train": table(), "test": table(21)}, options)


def test_invalid_folders_are_refused(load, image_folder, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no images in"):
        load(tmp_path / "empty")
    folder = image_folder(".", 3)
    with pytest.raises(DataError, match=r"000\.png …\) but no class folders"):
        load(folder)
    with pytest.raises(DataError, match="of only one class"):
        load(image_folder("a", 3))
    image_folder("train/x", 3)
    with pytest.raises(DataError, match=r"both splits \('train'\) and other folders \('a'\)"):
        load(folder)


def test_invalid_files_are_refused(load, table, tmp_path):
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=r"'cut.parquet' cannot be read"):
        load(tmp_path / "cut.parquet")
    (tmp_path / "table.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match="parquet or"):
        load(tmp_path / "table.csv")
    with pytest.raises(DataError, match="no file matches"):
        load(str(tmp_path / "*.arrow"))
    with pytest.raises(DataError, match="there is no data at"):
        load(tmp_path / "nowhere" / "at" / "all")
    with pytest.raises(DataError, match="there is no data at"):
        load("")


def test_folders_of_several_datasets_are_not_joined(load, table, tmp_path):
    for name in ("one", "two"):
        (tmp_path / "all" / name).mkdir(parents=True)
        table(30).to_parquet(tmp_path / "all" / name / "train.parquet")
    with pytest.raises(DataError, match="holds several datasets: 'one', 'two'; give one of them"):
        load(tmp_path / "all")
    for name in ("train", "test"):
        (tmp_path / "split" / name).mkdir(parents=True)
        table(30).to_parquet(tmp_path / "split" / name / "0.parquet")
    assert len(load(tmp_path / "split").test) == 30


def test_a_large_table_is_read_row_by_row(load, table, monkeypatch):
    small = load(table())
    monkeypatch.setattr("hf_retarget.data.tables._SMALL_TABLE", 0)
    large = load(table())
    assert pictures(large.train) == pictures(small.train)
    assert not isinstance(large.train.rows._cells, list)


def test_invalid_tables_are_refused(load, table):
    with pytest.raises(DataError, match=r"no column holds images; there are 'label'"):
        load(table().remove_columns("image"))
    with pytest.raises(DataError, match=r"no column holds labels; there are 'image'"):
        load(table().remove_columns("label"))
    twice = table().rename_column("label", "one").add_column("two", [0, 1, 2] * 20)
    twice = twice.cast_column("two", twice.features["one"])
    with pytest.raises(
        DataError, match=r"several columns could hold labels: 'one', 'two'; choose one with 'label_column'"
    ):
        load(twice)
    with pytest.raises(DataError, match="no images in the split 'train'"):
        load(table().select([]))


def test_invalid_python_data_is_refused(load):
    with pytest.raises(DataError, match="give a map-style dataset"):
        load(iter([1, 2]))
    with pytest.raises(DataError, match="is empty"):
        load([])
    with pytest.raises(DataError, match="not pairs"):
        load([1, 2])
    with pytest.raises(DataError, match="a str is not an image"):
        load([("a.png", 0), ("b.png", 1)])
    with pytest.raises(DataError, match=r"values from -1 to -1, not from 0 to 1; give images before normalisation"):
        load([(torch.full((3, 8, 8), -1.0), 0)])


def test_hub_data_without_a_network_is_explained(load, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        DataError, match=r"'fashion-minst' cannot be loaded from the Hub: .*did you mean 'fashion-mnist'"
    ):
        load("fashion-minst")


def test_no_progress_is_shown_without_a_terminal(load, table, tmp_path, capfd):
    table(12).to_parquet(tmp_path / "letters.parquet")
    capfd.readouterr()
    load(tmp_path / "letters.parquet")
    assert capfd.readouterr() == ("", "")
