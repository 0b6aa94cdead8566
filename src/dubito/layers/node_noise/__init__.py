"""Factors on the nodes of layers: per row in training, folded into weights at prediction."""

from .dropping import bernoulli_factors as bernoulli_factors
from .dropping import factors_on_inputs as factors_on_inputs
from .dropping import per_example as per_example
from .dropping import read_first as read_first
from .first import Patches as Patches
from .place import by_row as by_row
from .place import factors_on as factors_on
from .place import fold as fold
from .values import Factor as Factor
from .values import Sides as Sides
