"""Laplace posteriors: diagonal, KFAC, EFB and the sparse information form."""

from .method import Laplace as Laplace
from .method import last_layer as last_layer
from .online import OnlineEvidence as OnlineEvidence
from .posterior import LaplacePosterior as LaplacePosterior
from .structures import EFB as EFB
from .structures import INF as INF
from .structures import KFAC as KFAC
from .structures import Diagonal as Diagonal
