"""Trained networks that several tables share: kept in the user's cache, where an interrupted training goes on."""

from pathlib import Path
from typing import Any

from dubito.data.locate import cache_folder
from dubito.storage import encode
from dubito.storage.files import json_checksum

from ..settings import decisive


def folder() -> Path:
    """Where trainings, and what is made of data for several tables, are kept."""
    place = cache_folder().parent / "trained"
    place.mkdir(parents=True, exist_ok=True)
    return place


def checkpoint(data: str, revision: int, settings: Any, seed: int) -> Path:
    """The file of one training.

    Args:
        data: what it learns from.
        revision: raised when a change of the code changes what training gives.
        settings: all that decides the training.
        seed: its seed.
    """
    key = json_checksum([data, revision, decisive(encode(settings)), seed])
    return folder() / f"{key}.safetensors"
