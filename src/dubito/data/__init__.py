"""Named data sets, and tables of one's own, as training, validation and test tensors."""

from .loading import load as load
from .locate import listing as listing
from .parts import Data as Data
from .parts import Part as Part
from .parts import Scaling as Scaling
