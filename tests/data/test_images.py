"""MNIST, Fashion-MNIST and CIFAR-10, where they are; and how their files are read, from files made here."""

from __future__ import annotations

import gzip
import hashlib
import struct

import numpy as np
import pytest

from fedpact import data
from fedpact.core.errors import DatasetMissing
from fedpact.data import images


@pytest.mark.parametrize(
    ("name", "rows", "pixels", "test"),
    [("mnist", 70_000, 784, 60_000), ("fashion_mnist", 70_000, 784, 60_000), ("cifar10", 60_000, 3072, 50_000)],
)
def test_the_images_are_bytes_with_a_test_set(name, rows, pixels, test, monkeypatch):
    monkeypatch.setattr("urllib.request.urlopen", _offline)
    try:
        dataset = data.load(name)
    except DatasetMissing as error:
        pytest.skip(str(error))
    assert dataset.x.shape == (rows, pixels)
    assert dataset.x.dtype == np.uint8
    assert dataset.test.tolist() == list(range(test, rows))
    assert len(dataset.classes) == 10
    assert np.bincount(dataset.y[dataset.test].astype(int)).sum() == 10_000
    assert dataset.x.max() == 255
    mean = {"mnist": 0.1307, "fashion_mnist": 0.2860, "cifar10": 0.4734}[name]  # as published, of the training pixels
    assert dataset.x[:test].mean() / 255 == pytest.approx(mean, abs=2e-4)


def _offline(*_, **__):
    raise OSError("no network in tests")


def idx(array):
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def test_idx_files_are_read_packed_or_not(tmp_path, monkeypatch):
    """The first four files are written here with 4 and 2 images; the checksums are those of these."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (6, 28, 28)).astype(np.uint8), np.array([3, 0, 9, 1, 2, 2], np.uint8)
    parts = [idx(x[:4]), idx(y[:4]), idx(x[4:]), idx(y[4:])]
    (tmp_path / "mnist").mkdir()
    for name, content, packed in zip(images.IDX, parts, (True, False, True, True), strict=True):
        path = tmp_path / "mnist" / (f"{name}.gz" if packed else name)
        path.write_bytes(gzip.compress(content) if packed else content)
    monkeypatch.setenv("FEDPACT_DATA", str(tmp_path))
    monkeypatch.setattr(images, "MNIST_SUMS", tuple(hashlib.sha256(part).hexdigest() for part in parts))
    monkeypatch.setattr(images, "_images", lambda name, pixels, labels, train, classes: (pixels, labels))
    pixels, labels = images.mnist()
    np.testing.assert_array_equal(pixels.reshape(6, 28, 28), x)
    np.testing.assert_array_equal(labels, y)


def test_the_colours_of_a_pixel_stand_together(monkeypatch):
    """The files have all reds, then all greens, then all blues; an image here is (32, 32, 3)."""
    planes = np.zeros((3, 32, 32), np.uint8)
    planes[0, 5, 7], planes[1, 5, 7], planes[2, 5, 7] = 10, 20, 30
    monkeypatch.setattr(images, "_cifar_batches", lambda: [bytes([4]) + planes.tobytes()] * 2)
    monkeypatch.setattr(images, "_images", lambda name, pixels, labels, train, classes: (pixels, labels))
    pixels, labels = images.cifar10()
    assert pixels.reshape(2, 32, 32, 3)[1, 5, 7].tolist() == [10, 20, 30]
    assert labels.tolist() == [4, 4]
