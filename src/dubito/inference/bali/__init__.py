"""BALI: a network as a stack of Bayesian linear regressions."""

from .method import BALI as BALI
from .posterior import BALIPosterior as BALIPosterior
