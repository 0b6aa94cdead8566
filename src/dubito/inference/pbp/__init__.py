"""Probabilistic backpropagation."""

from .method import PBP as PBP
from .posterior import PBPPosterior as PBPPosterior
