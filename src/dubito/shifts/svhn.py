"""SVHN's test images, which are not fetched for you: its publisher asks for non-commercial use."""

from pathlib import Path

import torch
from torch import Tensor

from ..data.locate import folders
from ..errors import DataError, StorageError, require_extra

NAME = "svhn/test_32x32.mat"
URL = "http://ufldl.stanford.edu/housenumbers/test_32x32.mat"
SHAPE = (26032, 3, 32, 32)


def svhn_test() -> Tensor:
    """The 26,032 test images of cropped digits, [B, 3, 32, 32] with values from 0 to 1."""
    path = next((path for folder in folders() if (path := folder / NAME).is_file()), None)
    if path is None:
        looked = ", ".join(str(folder) for folder in folders())
        raise DataError(
            f"SVHN is not here (looked for {NAME} in {looked}); fetch {URL} (64 MB, for non-commercial use) and put it "
            f"at <folder>/{NAME} for one of these folders, or name another by DUBITO_DATA"
        )
    return read(path)


def read(path: Path) -> Tensor:
    """Images of a file of the publisher's form: an array X [32, 32, 3, B] of 0 to 255."""
    scipy = require_extra("scipy.io", "cli", "reading SVHN")
    try:
        images = scipy.loadmat(path)["X"]
    except Exception as error:  # SciPy has errors of its own, and a file may hold anything
        raise StorageError(
            f"{path} should hold SVHN's test images as X, but reading it failed ({error}); fetch {URL} again"
        ) from error
    pixels = torch.from_numpy(images).permute(3, 2, 0, 1)
    if pixels.shape[1:] != SHAPE[1:] or pixels.dtype != torch.uint8:
        raise StorageError(
            f"{path} should hold images [32, 32, 3, B] of bytes, got {images.dtype}, {list(images.shape)}; fetch {URL} "
            "again"
        )
    return pixels.to(torch.get_default_dtype()) / 255
