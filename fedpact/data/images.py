"""Images of ten classes: MNIST, Fashion-MNIST, CIFAR-10. Pixels stay bytes; the owners' test images stay a test set."""

from __future__ import annotations

import tarfile

import numpy as np

from fedpact.data.dataset import Column, Dataset, Schema
from fedpact.data.files import contents, locate, present

MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
CIFAR = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
# SHA-256 of the files' contents, unpacked.
MNIST_SUMS = (
    "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
)
FASHION_SUMS = (
    "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
)
CIFAR_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"  # of the archive
CIFAR_SUMS = {
    "data_batch_1": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch": "803d5f7f4d78ea53de84dbe85f74fb6d",
}


def mnist() -> Dataset:
    """MNIST: 60,000 + 10,000 handwritten digits, 28×28 pixels (LeCun et al. 1998, CC BY-SA 3.0)."""
    return _idx("mnist", MNIST, MNIST_SUMS, tuple("0123456789"))


def fashion_mnist() -> Dataset:
    """Fashion-MNIST: 60,000 + 10,000 pictures of clothes, 28×28 pixels (Xiao et al. 2017, MIT)."""
    names = "T-shirt Trouser Pullover Dress Coat Sandal Shirt Sneaker Bag Boot"
    return _idx("fashion-mnist", FASHION, FASHION_SUMS, tuple(names.split()))


def cifar10() -> Dataset:
    """CIFAR-10: 50,000 + 10,000 colour pictures of 32×32 pixels (Krizhevsky 2009), from the binary batches."""
    table = np.frombuffer(b"".join(_cifar_batches()), np.uint8).reshape(-1, 3073)
    pixels = table[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1).reshape(-1, 3072)  # a pixel's colours together
    names = "airplane automobile bird cat deer dog frog horse ship truck"
    return _images("cifar10", pixels, table[:, 0], 50_000, tuple(names.split()))


def _cifar_batches() -> list[bytes]:
    """The six batches: as files of their own where they are, else from the official archive."""
    found = [present("cifar-10", f"{name}.bin", md5) for name, md5 in CIFAR_SUMS.items()]
    if all(part is not None for part in found):
        return found  # type: ignore[return-value]
    archive = locate("cifar-10", CIFAR.rpartition("/")[2], CIFAR_MD5, CIFAR)
    with tarfile.open(archive) as members:
        return [members.extractfile(f"cifar-10-batches-bin/{name}.bin").read() for name in CIFAR_SUMS]  # type: ignore[union-attr]


def _idx(name: str, address: str, sums: tuple[str, ...], classes: tuple[str, ...]) -> Dataset:
    read = [contents(name, [f"{f}.gz", f], s, f"{address}{f}.gz") for f, s in zip(IDX, sums, strict=True)]
    images = np.concatenate([np.frombuffer(text, np.uint8, offset=16) for text in (read[0], read[2])]).reshape(-1, 784)
    labels = np.concatenate([np.frombuffer(text, np.uint8, offset=8) for text in (read[1], read[3])])
    return _images(name.replace("-", "_"), images, labels, 60_000, classes)


def _images(name: str, pixels: np.ndarray, labels: np.ndarray, train: int, classes: tuple[str, ...]) -> Dataset:
    columns = tuple(Column(f"pixel {i}", "number") for i in range(pixels.shape[1]))
    plain = (1.0,) * len(columns), (0.0,) * len(columns)
    test = np.arange(train, len(labels))
    return Dataset(name, pixels, labels.astype(np.float64), Schema(columns, *plain, "class", classes), {}, "none", test)
