"""Made the embedded Fashion-MNIST from Debian's package `dataset-fashion-mnist`; kept to show how, and to make it anew.

apt-get install dataset-fashion-mnist
python -m hf_retarget.data.embedded.make /usr/share/datasets/fashion-mnist
"""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from hf_retarget.data.embedded import EMBEDDED
from hf_retarget.files import atomic_path

LABELS = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)


def make_fashion_mnist(source: Path, folder: Path, train: int = 600, test: int = 150) -> None:
    """Write the first `train` and `test` images of each class as PNGs in two parquet files."""
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    features = {"image": {"_type": "Image"}, "label": {"names": list(LABELS), "_type": "ClassLabel"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    for name, prefix, each in (("train", "train", train), ("test", "t10k", test)):
        images = _read(source / f"{prefix}-images-idx3-ubyte.gz", offset=16).reshape(-1, 28, 28)
        labels = _read(source / f"{prefix}-labels-idx1-ubyte.gz", offset=8)
        kept = np.sort(np.concatenate([np.flatnonzero(labels == label)[:each] for label in range(len(LABELS))]))
        pictures = [{"bytes": _png(images[i]), "path": None} for i in kept]
        image = pa.array(pictures, pa.struct({"bytes": pa.binary(), "path": pa.string()}))
        table = pa.table({"image": image, "label": pa.array(labels[kept].astype("int64"))})
        with atomic_path(folder / f"{name}.parquet") as temporary:
            pq.write_table(table.replace_schema_metadata(metadata), temporary, compression="none")


def _read(path: Path, offset: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8, offset=offset)


def _png(pixels: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


if __name__ == "__main__":
    make_fashion_mnist(Path(sys.argv[1]), EMBEDDED["fashion-mnist"])
