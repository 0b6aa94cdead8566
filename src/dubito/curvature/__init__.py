"""Curvature of the loss around a point, from recorded passes, streamed over the data."""

from .blocks import Block as Block
from .blocks import Statistics as Statistics
from .blocks import check_blocks as check_blocks
from .covering import Cover as Cover
from .covering import cover as cover
from .covering import find_blocks as find_blocks
from .kinds import GGN as GGN
from .kinds import Curvature as Curvature
from .kinds import Empirical as Empirical
from .kinds import Fisher as Fisher
from .kinds import usual_curvature as usual_curvature
from .statistics import statistics as statistics
