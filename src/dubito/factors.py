"""Laws of node factors and where they start, as settings of `Rank1` and `BatchEnsemble`."""

from .node_factors.laws import Family as Family
from .node_factors.laws import NearOne as NearOne
from .node_factors.laws import Normal as Normal
from .node_factors.laws import Point as Point
from .node_factors.laws import Signs as Signs
from .node_factors.other_laws import Cauchy as Cauchy
from .node_factors.other_laws import HalfCauchy as HalfCauchy
from .node_factors.other_laws import InverseGamma as InverseGamma
from .node_factors.other_laws import LogNormal as LogNormal
