"""Which files go to LFS, and what git keeps of them."""

from __future__ import annotations

from pathlib import PurePosixPath

LARGEST_REGULAR = 10 * 1024 * 1024

# From the .gitattributes a new repository on the Hub has; images are in those of datasets.
_LFS_SUFFIXES = """
.7z .arrow .bin .bz2 .ckpt .ftz .gz .h5 .joblib .model .msgpack .npy .npz .onnx .ot .parquet .pb .pickle .pkl .pt
.pth .rar .safetensors .tar .tflite .tgz .wasm .xz .zip .zst .jpg .jpeg .png .gif .webp .tiff .bmp
"""
LFS_SUFFIXES = frozenset(_LFS_SUFFIXES.split())


def belongs_in_lfs(path: str, size: int, sample: bytes) -> bool:
    """Large files, known binary formats, and whatever has a zero byte at its beginning.

    >>> belongs_in_lfs("model.safetensors", 8, b""), belongs_in_lfs("README.md", 8, b"# Title")
    (True, False)
    """
    if size == 0:
        return False
    return size > LARGEST_REGULAR or PurePosixPath(path).suffix.lower() in LFS_SUFFIXES or b"\0" in sample


def pointer(digest: str, size: int) -> bytes:
    """The small text that git keeps in place of the content."""
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize {size}\n".encode()
