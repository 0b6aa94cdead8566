"""The one training loop and its settings."""

from .loop import Run as Run
from .loop import train as train
from .settings import Training as Training
