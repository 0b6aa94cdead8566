"""The image sets: as this project's npz archives, or as the publishers' own files, which can be downloaded.

The publishers' sizes and checksums are those that several public projects record for these files. The MD5 that
one of them gives beside its checksum of MNIST's test images is the one our archive's README states, and the batches
of CIFAR-10, packed again from our archives, have the checksums recorded for those inside the publisher's.
"""

import numpy as np

from .readers import binary_colour, idx_grey, npz_grey, residual_colour
from .registry import Entry, File, StoredForm

_PARTS = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
_BOTH = {"train": (60000, 1, 28, 28), "test": (10000, 1, 28, 28)}
_TEST = {"test": (10000, 1, 28, 28)}

# Of the full CIFAR-10 training set, in the shape of an image [3, 1, 1]
_CIFAR10_STATISTICS = (
    np.array([0.4914, 0.4822, 0.4465])[:, None, None],
    np.array([0.2470, 0.2435, 0.2616])[:, None, None],
)


def _published(folder: str, base: str, facts: tuple[tuple[int, str], ...]) -> StoredForm:
    """The four files of a publisher who follows MNIST's format, in the order of `_PARTS`."""
    files = tuple(
        File(path=f"{folder}/{part}-ubyte.gz", size=size, sha256=sha256, url=f"{base}/{part}-ubyte.gz")
        for part, (size, sha256) in zip(_PARTS, facts, strict=True)
    )
    return StoredForm(files=files, read=idx_grey, shapes=_BOTH)


def _grey(*forms: StoredForm, licence: str, source: str, target: str, classes: str) -> Entry:
    return Entry(
        task="classification",
        kind="image",
        licence=licence,
        source=source,
        target_name=target,
        forms=forms,
        tail=10_000,
        class_names=tuple(classes.split(", ")),
    )


IMAGES = {
    "mnist": _grey(
        StoredForm(
            files=(
                File(
                    path="mnist.npz",
                    size=11490519,
                    sha256="06af5dfe73b70e3bc1c36439982b18a8d76803db9b544f6fdf838a37fbb01b64",
                ),
            ),
            read=npz_grey,
            shapes=_BOTH,
        ),
        _published(
            "mnist",
            "https://storage.googleapis.com/cvdf-datasets/mnist",
            (
                (9912422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
                (28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
                (1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
                (4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
            ),
        ),
        licence="CC BY-SA 3.0",
        source="LeCun, Cortes and Burges, the MNIST database",
        target="digit",
        classes="0, 1, 2, 3, 4, 5, 6, 7, 8, 9",
    ),
    "fashion-mnist": _grey(
        StoredForm(
            files=(
                File(
                    path="fashion_mnist.npz",
                    size=30869925,
                    sha256="5b6d2c4c694a91887af8ab7d039c04f80af3c29378d731c93a538d2e831aa469",
                ),
            ),
            read=npz_grey,
            shapes=_BOTH,
        ),
        _published(
            "fashion-mnist",
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
            (
                (26421880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
                (29515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
                (4422102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
                (5148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
            ),
        ),
        licence="MIT",
        source="Zalando Research, Fashion-MNIST",
        target="article",
        classes="T-shirt/top, Trouser, Pullover, Dress, Coat, Sandal, Shirt, Sneaker, Bag, Ankle boot",
    ),
    "kmnist": _grey(
        _published(
            "kmnist",
            "http://codh.rois.ac.jp/kmnist/dataset/kmnist",
            (
                (18165135, "51467d22d8cc72929e2a028a0428f2086b092bb31cfb79c69cc0a90ce135fde4"),
                (29497, "e38f9ebcd0f3ebcdec7fc8eabdcdaef93bb0df8ea12bee65224341c8183d8e17"),
                (3041136, "edd7a857845ad6bb1d0ba43fe7e794d164fe2dce499a1694695a792adfac43c5"),
                (5120, "20bb9a0ef54c7db3efc55a92eef5582c109615df22683c380526788f98e42a1c"),
            ),
        ),
        StoredForm(
            files=(
                File(
                    path="kmnist_test.npz",
                    size=3084805,
                    sha256="728108ee1c140eb801987c1c9d596b353154de6944a94979bf8915cc8a7f7add",
                ),
            ),
            read=npz_grey,
            shapes=_TEST,
        ),
        licence="CC BY-SA 4.0",
        source="ROIS-DS Center for Open Data in the Humanities, Kuzushiji-MNIST",
        target="character",
        classes="o, ki, su, tsu, na, ha, ma, ya, re, wo",
    ),
    "notmnist": _grey(
        StoredForm(
            files=(
                File(
                    path="notmnist_10k.npz",
                    size=3212540,
                    sha256="7b423f80fd5a6af4d2619bd89372c8cbcb699e7bd6e29babe0c17246f479bffe",
                ),
            ),
            read=npz_grey,
            shapes=_TEST,
        ),
        StoredForm(
            files=tuple(
                File(
                    path=f"notmnist/{part}-ubyte.gz",
                    url="https://raw.githubusercontent.com/davidflanagan/notMNIST-to-MNIST/"
                    f"c58c29ff93d7b8c809c449b380a232f9f39909fd/{part}-ubyte.gz",
                )
                for part in _PARTS[2:]
            ),
            read=idx_grey,
            shapes=_TEST,
            content="dd6b5310297fe4c736ca05f0c33f5a29179ee37ddd664c15f692b826d04f435c",
        ),
        licence="MIT (repository); posted with permission of the data's author",
        source="davidflanagan/notMNIST-to-MNIST, 10,000 images of notMNIST_small",
        target="letter",
        classes="A, B, C, D, E, F, G, H, I, J",
    ),
    "cifar10": Entry(
        task="classification",
        kind="image",
        licence="none stated",
        source="Krizhevsky, CIFAR-10; this project's archive holds the first 20,000 training images",
        target_name="object",
        forms=(
            StoredForm(
                files=(
                    File(
                        path="cifar-10-binary.tar.gz",
                        size=170052171,
                        sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
                        url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                    ),
                ),
                read=binary_colour(
                    [f"data_batch_{number}.bin" for number in range(1, 6)],
                    "test_batch.bin",
                    "batches.meta.txt",
                    label_bytes=1,
                    statistics=_CIFAR10_STATISTICS,
                ),
                shapes={"train": (50000, 3, 32, 32), "test": (10000, 3, 32, 32)},
            ),
            StoredForm(
                files=(
                    File(
                        path="cifar10_train20k.npz",
                        size=33685150,
                        sha256="9d9f2e1a9f8221d9625361be2fe09fb20e6c3c39f9e7a0c6134e91402c4e84f9",
                    ),
                    File(
                        path="cifar10_test.npz",
                        size=16855335,
                        sha256="3e27a4dafdb8731c50a247780214fded64603aa8fe4f37d62e745c4a8fce0dab",
                    ),
                ),
                read=residual_colour(_CIFAR10_STATISTICS),
                shapes={"train": (20000, 3, 32, 32), "test": (10000, 3, 32, 32)},
            ),
        ),
    ),
    "cifar100": Entry(
        task="classification",
        kind="image",
        licence="none stated",
        source="Krizhevsky, CIFAR-100, fine classes; this project's archive holds the test part",
        target_name="object",
        tail=10_000,
        forms=(
            StoredForm(
                files=(
                    File(
                        path="cifar-100-binary.tar.gz",
                        size=168513733,
                        sha256="58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
                        url="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
                    ),
                ),
                read=binary_colour(["train.bin"], "test.bin", "fine_label_names.txt", label_bytes=2),
                shapes={"train": (50000, 3, 32, 32), "test": (10000, 3, 32, 32)},
            ),
            StoredForm(
                files=(
                    File(
                        path="cifar100_test.npz",
                        size=17312469,
                        sha256="1041bc74757511cacd41da4e578248d864ec2af8275a156bad26b355e0520f0e",
                    ),
                ),
                read=residual_colour(),
                shapes={"test": (10000, 3, 32, 32)},
            ),
        ),
    ),
}
