"""Curvature of the loss around a point, from taps, streamed over the data."""

from .diagonal import diagonal as diagonal
from .kinds import GGN as GGN
from .kinds import Curvature as Curvature
from .kinds import Empirical as Empirical
from .kinds import Fisher as Fisher
