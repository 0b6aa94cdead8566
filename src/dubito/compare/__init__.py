"""One comparison: methods trained alike on the same data, judged alike, ranked."""

from .run import Comparison as Comparison
from .run import compare as compare
from .settings import Settings as Settings
