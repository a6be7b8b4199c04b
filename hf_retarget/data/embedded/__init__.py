"""Datasets that come with the package, so that a demo needs no network.

The part of Fashion-MNIST was made from Debian's package `dataset-fashion-mnist`; to repeat it:

    from hf_retarget.data.embedded import EMBEDDED, make_fashion_mnist
    make_fashion_mnist(Path("/usr/share/datasets/fashion-mnist"), EMBEDDED["fashion-mnist"])
"""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path

from hf_retarget.files import atomic_path

EMBEDDED = {"fashion-mnist": Path(__file__).parent / "fashion-mnist"}
"""Name → folder with one parquet file for each split."""

_LABELS = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]


def make_fashion_mnist(source: Path, folder: Path, train: int = 600, test: int = 150) -> None:
    """Write the first `train` and `test` images of each class as PNGs in two parquet files."""
    import numpy as np
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]
    from PIL import Image

    def read(name: str, offset: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        return np.frombuffer(gzip.decompress((source / f"{name}-ubyte.gz").read_bytes()), np.uint8, offset=offset)

    features = {"image": {"_type": "Image"}, "label": {"names": _LABELS, "_type": "ClassLabel"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    for name, prefix, each in (("train", "train", train), ("test", "t10k", test)):
        pixels = read(f"{prefix}-images-idx3", 16).reshape(-1, 28, 28)
        labels = read(f"{prefix}-labels-idx1", 8)
        kept = np.sort(np.concatenate([np.flatnonzero(labels == label)[:each] for label in range(len(_LABELS))]))
        images = []
        for index in kept:
            buffer = io.BytesIO()
            Image.fromarray(pixels[index]).save(buffer, "PNG", optimize=True)
            images.append({"bytes": buffer.getvalue(), "path": None})
        column = pa.array(images, pa.struct({"bytes": pa.binary(), "path": pa.string()}))
        table = pa.table({"image": column, "label": pa.array(labels[kept].astype("int64"))})
        with atomic_path(folder / f"{name}.parquet") as temporary:
            pq.write_table(table.replace_schema_metadata(metadata), temporary, compression="none")
