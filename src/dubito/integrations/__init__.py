"""Bridges to other libraries, each with its own extra: scikit-learn, and callbacks for loggers and tuners."""

from typing import TYPE_CHECKING

from ..lazy import attach

if TYPE_CHECKING:
    from .callbacks import CSV as CSV
    from .callbacks import OptunaPruning as OptunaPruning
    from .callbacks import TensorBoard as TensorBoard

_NAMES = {"callbacks": ("CSV", "OptunaPruning", "TensorBoard")}
__getattr__, __dir__, __all__ = attach(__name__, _NAMES, ())
