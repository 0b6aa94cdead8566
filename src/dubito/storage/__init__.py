"""Posteriors and checkpoints as safetensors with one JSON key; no pickle anywhere."""

from .files import checksum as checksum
from .files import exists as exists
from .files import json_checksum as json_checksum
from .files import read as read
from .files import write as write
from .settings import LATER as LATER
from .settings import decode as decode
from .settings import encode as encode
from .settings import plain as plain
from .whole import write_text as write_text
