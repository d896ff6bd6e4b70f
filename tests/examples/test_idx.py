"""The IDX reader against bytes written by hand."""

import gzip
import os
import re

import numpy as np
import pytest

from examples import idx

# Two images of 2 x 3 and their labels, byte by byte.
IMAGES = bytes.fromhex("00000803 00000002 00000002 00000003 000102030405 fffefdfcfbfa")
LABELS = bytes.fromhex("00000801 00000002 07 03")
PIXELS = [[[0, 1, 2], [3, 4, 5]], [[255, 254, 253], [252, 251, 250]]]


def write_four(folder, images=IMAGES, labels=LABELS, name="{stem}-idx{rank}-ubyte", pack=bytes):
    for part in ("train", "t10k"):
        for stem, rank, data in ((f"{part}-images", 3, images), (f"{part}-labels", 1, labels)):
            (folder / name.format(stem=stem, rank=rank)).write_bytes(pack(data))
    return folder


def message(path, what, got, expected):
    """A pattern for the whole of an error's text: file, got and expected."""
    return f"^{re.escape(f'{path}: {what}: got {got}, expected {expected}')}$"


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["raw", "gzip"])
def test_values_and_dtypes(tmp_path, pack):
    path = tmp_path / "any name"
    path.write_bytes(pack(IMAGES))
    images = idx.read_images(path)
    assert images.dtype == np.float32
    np.testing.assert_array_equal(images, np.float32(PIXELS) / np.float32(255))
    assert (images.min(), images.max()) == (0, 1)

    path.write_bytes(pack(LABELS))
    labels = idx.read_labels(path)
    assert labels.dtype == np.int32
    np.testing.assert_array_equal(labels, [7, 3])


@pytest.mark.parametrize(
    ("data", "got"),
    [
        (LABELS, "0x00000801"),  # a rank that is another file's
        (b"\0\0\x0d\x03" + IMAGES[4:], "0x00000d03"),  # 32-bit floats
        (b"\x03\x08\0\0" + IMAGES[4:], "0x03080000"),  # little-endian
        (b"\0\0", "0x0000"),
        (b"", "0x"),
    ],
)
def test_bad_magic_number(tmp_path, data, got):
    path = tmp_path / "images"
    path.write_bytes(data)
    with pytest.raises(idx.IdxError, match=message(path, "magic number", got, "0x00000803")):
        idx.read_images(path)


def test_images_are_no_labels(tmp_path):
    path = tmp_path / "labels"
    path.write_bytes(IMAGES)
    with pytest.raises(idx.IdxError, match=message(path, "magic number", "0x00000803", "0x00000801")):
        idx.read_labels(path)


@pytest.mark.parametrize(
    ("data", "what", "got", "expected"),
    [
        (IMAGES[:15], "header", "15 bytes", "16 bytes"),
        (IMAGES[:16], "data", "0 bytes", "12 bytes for shape (2, 2, 3)"),
        (IMAGES[:-1], "data", "11 bytes", "12 bytes for shape (2, 2, 3)"),
        (IMAGES + b"\0", "data", "13 bytes", "12 bytes for shape (2, 2, 3)"),
        (
            IMAGES[:4] + b"\xff" * 12 + IMAGES[16:],  # the product is beyond 64 bits
            "data",
            "12 bytes",
            f"{(2**32 - 1) ** 3} bytes for shape {(2**32 - 1,) * 3}",
        ),
    ],
)
def test_truncated_or_too_long(tmp_path, data, what, got, expected):
    path = tmp_path / "images"
    path.write_bytes(data)
    with pytest.raises(idx.IdxError, match=message(path, what, got, expected)):
        idx.read_images(path)


def test_damaged_gzip(tmp_path):
    path = tmp_path / "images.gz"
    whole = gzip.compress(IMAGES)
    flipped = bytearray(whole)
    flipped[-5] ^= 0xFF  # the checksum
    for damaged in (whole[:-9], bytes(flipped), whole[:10] + b"\xff" * 20):
        path.write_bytes(damaged)
        with pytest.raises(idx.IdxError, match=r"images\.gz: compressed data: got .*, expected a"):
            idx.read_images(path)


@pytest.mark.parametrize("mark", ["-", "."])
@pytest.mark.parametrize(("end", "pack"), [("", bytes), (".gz", gzip.compress)])
def test_file_names(tmp_path, mark, end, pack):
    data = idx.read_mnist(write_four(tmp_path, name=f"{{stem}}{mark}idx{{rank}}-ubyte{end}", pack=pack))
    assert data.train_images.shape == data.test_images.shape == (2, 2, 3)
    assert data.train_labels.tolist() == data.test_labels.tolist() == [7, 3]


def test_a_missing_file_names_what_was_looked_for(tmp_path):
    (write_four(tmp_path) / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(FileNotFoundError, match="none of the files t10k-labels-idx1-ubyte, t10k"):
        idx.read_mnist(tmp_path)


def test_count_mismatch(tmp_path):
    write_four(tmp_path, labels=bytes.fromhex("00000801 00000003 07 03 01"))
    images, labels = tmp_path / "train-images-idx3-ubyte", tmp_path / "train-labels-idx1-ubyte"
    expected = f"2, the number of images in {images}"
    with pytest.raises(idx.IdxError, match=message(labels, "number of labels", 3, expected)):
        idx.read_mnist(tmp_path)


def test_no_images(tmp_path):
    write_four(
        tmp_path,
        images=bytes.fromhex("00000803 00000000 00000002 00000003"),
        labels=bytes.fromhex("00000801 00000000"),
    )
    path = tmp_path / "train-images-idx3-ubyte"
    with pytest.raises(idx.IdxError, match=message(path, "number of images", 0, "at least 1")):
        idx.read_mnist(tmp_path)


def test_test_images_of_another_shape(tmp_path):
    write_four(tmp_path)
    path = tmp_path / "t10k-images-idx3-ubyte"
    path.write_bytes(bytes.fromhex("00000803 00000002 00000003 00000002") + IMAGES[16:])
    with pytest.raises(idx.IdxError, match=message(path, "shape of an image", (3, 2), (2, 3))):
        idx.read_mnist(tmp_path)


def test_write_gives_the_bytes_of_the_format(tmp_path):
    idx.write_idx(tmp_path / "images", np.array(PIXELS, np.uint8))
    idx.write_idx(tmp_path / "labels", np.array([7, 3], np.uint8))
    assert (tmp_path / "images").read_bytes() == IMAGES
    assert (tmp_path / "labels").read_bytes() == LABELS
    with pytest.raises(TypeError, match="`array` must be of dtype uint8, got float32"):
        idx.write_idx(tmp_path / "floats", np.zeros(3, np.float32))
    assert sorted(os.listdir(tmp_path)) == ["images", "labels"]


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "labels"
    path.write_bytes(LABELS)

    def fail(source, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        idx.write_idx(path, np.zeros(5, np.uint8))
    assert path.read_bytes() == LABELS
    assert os.listdir(tmp_path) == ["labels"]


def test_digits_are_written_once_and_split_evenly(tmp_path):
    folder = idx.cached_digits(tmp_path)
    assert folder == tmp_path / "digits"
    written = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()}
    assert len(written) == 4

    data = idx.read_mnist(folder)
    assert data.train_images.shape == (1437, 8, 8)
    assert data.test_images.shape == (360, 8, 8)
    assert data.train_images.max() == data.test_images.max() == 1
    fractions = np.bincount(data.test_labels) / np.bincount(np.concatenate([data.train_labels, data.test_labels]))
    np.testing.assert_allclose(fractions, 0.2, atol=0.005)

    assert idx.cached_digits(tmp_path) == folder
    assert written == {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in written}

    # A folder that lacks a file is made whole again, with the same bytes.
    lost = next(iter(written))
    lost.unlink()
    idx.cached_digits(tmp_path)
    assert {path: path.read_bytes() for path in folder.iterdir()} == {path: data for path, (_, data) in written.items()}


def test_default_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert idx.cached_digits() == tmp_path / "xdg" / "fusedopt" / "digits"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert idx.cached_digits() == tmp_path / "home" / ".cache" / "fusedopt" / "digits"
