"""Reader and writer of IDX, the file format of the MNIST family of data sets.

A file is a big-endian header and then the elements, the last dimension fastest::

    2 bytes   zero
    1 byte    element type; 0x08 is the unsigned byte, the only one of the MNIST family
    1 byte    rank
    4 bytes   size of each dimension, `rank` times
    ...       elements

The first four bytes together are the file's magic number: 0x00000803 for images, 0x00000801 for
labels. A file may be compressed by gzip, whatever its name.
"""

import gzip
import math
import os
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

UNSIGNED_BYTE = 0x08
IMAGES, LABELS = 3, 1  # ranks
GZIP_START = b"\x1f\x8b"


class IdxError(ValueError):
    """A file that is not what it should be: names the file, what it has and what was expected."""

    def __init__(self, path: str | os.PathLike, what: str, got: object, expected: object):
        super().__init__(f"{path}: {what}: got {got}, expected {expected}")


class Dataset(NamedTuple):
    """Images are float32 in [0, 1] of shape [n, rows, columns], labels int32 of shape [n]."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def read_idx(path: str | os.PathLike, rank: int) -> np.ndarray:
    """The file's unsigned bytes as an array of this rank."""
    data = Path(path).read_bytes()
    if data.startswith(GZIP_START):
        try:
            data = gzip.decompress(data)
        except (EOFError, OSError, zlib.error) as error:
            raise IdxError(path, "compressed data", f"`{error}`", "a whole gzip file") from error

    header_size = 4 + 4 * rank
    magic, expected = data[:4], struct.pack(">HBB", 0, UNSIGNED_BYTE, rank)
    if magic != expected:
        raise IdxError(path, "magic number", f"0x{magic.hex()}", f"0x{expected.hex()}")
    if len(data) < header_size:
        raise IdxError(path, "header", f"{len(data)} bytes", f"{header_size} bytes")

    # math.prod is exact; a product in NumPy could wrap around for a damaged header.
    shape = struct.unpack(f">{rank}I", data[4:header_size])
    got, expected = len(data) - header_size, math.prod(shape)
    if got != expected:
        raise IdxError(path, "data", f"{got} bytes", f"{expected} bytes for shape {shape}")
    return np.frombuffer(data, np.uint8, offset=header_size).reshape(shape)


def read_images(path: str | os.PathLike) -> np.ndarray:
    """Images as float32 in [0, 1]."""
    return read_idx(path, IMAGES).astype(np.float32) / np.float32(255)


def read_labels(path: str | os.PathLike) -> np.ndarray:
    """Labels as int32."""
    return read_idx(path, LABELS).astype(np.int32)


def write_idx(path: str | os.PathLike, array: np.ndarray) -> None:
    """Write unsigned bytes; the file appears whole or not at all."""
    path = Path(path)
    if array.dtype != np.uint8:
        raise TypeError(f"`array` must be of dtype uint8, got {array.dtype}")
    header = struct.pack(f">HBB{array.ndim}I", 0, UNSIGNED_BYTE, array.ndim, *array.shape)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(header + array.tobytes())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def find(folder: str | os.PathLike, stem: str, rank: int) -> Path:
    """The file of this stem under any of the names in which the data sets are handed around."""
    names = [f"{stem}{mark}idx{rank}-ubyte{end}" for mark in "-." for end in ("", ".gz")]
    for name in names:
        if (path := Path(folder) / name).is_file():
            return path
    raise FileNotFoundError(f"{folder}: got none of the files {', '.join(names)}, expected one")


def read_pair(folder: str | os.PathLike, stem: str) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of the stem `train` or `t10k`."""
    images_path, labels_path = (
        find(folder, f"{stem}-images", IMAGES),
        find(folder, f"{stem}-labels", LABELS),
    )
    images, labels = read_images(images_path), read_labels(labels_path)
    if len(images) != len(labels):
        expected = f"{len(images)}, the number of images in {images_path}"
        raise IdxError(labels_path, "number of labels", len(labels), expected)
    if len(images) == 0:
        raise IdxError(images_path, "number of images", 0, "at least 1")
    return images, labels


def read_mnist(folder: str | os.PathLike) -> Dataset:
    """The four files of a data set of the MNIST family."""
    data = Dataset(*read_pair(folder, "train"), *read_pair(folder, "t10k"))
    got, expected = data.test_images.shape[1:], data.train_images.shape[1:]
    if got != expected:
        raise IdxError(find(folder, "t10k-images", IMAGES), "shape of an image", got, expected)
    return data


def cached_digits(cache: str | os.PathLike | None = None) -> Path:
    """The folder with scikit-learn's 1797 handwritten digits (8 x 8) as IDX files, made at need.

    Four fifths of each digit are for training, by a fixed seed. The default place is `fusedopt` in
    the user's cache folder.
    """
    if cache is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fusedopt"
    folder = Path(cache) / "digits"
    stems = ("train-images-idx3", "t10k-images-idx3", "train-labels-idx1", "t10k-labels-idx1")
    paths = [folder / f"{stem}-ubyte" for stem in stems]
    if not all(path.is_file() for path in paths):
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        digits = load_digits()
        images = np.rint(digits.images * (255 / 16)).astype(np.uint8)
        labels = digits.target.astype(np.uint8)
        split = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
        folder.mkdir(parents=True, exist_ok=True)
        # Whoever else writes them at this moment writes the same bytes.
        for path, array in zip(paths, split):
            write_idx(path, array)
    return folder
