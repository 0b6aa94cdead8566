"""Named data sets, and tables of one's own, as training, validation and test tensors."""

from typing import TYPE_CHECKING

from ..lazy import attach

if TYPE_CHECKING:
    from .loading import load as load
    from .locate import listing as listing
    from .parts import Data as Data
    from .parts import Part as Part
    from .parts import Scaling as Scaling

_NAMES = {"loading": ("load",), "locate": ("listing",), "parts": ("Data", "Part", "Scaling")}
__getattr__, __dir__, __all__ = attach(__name__, _NAMES)
