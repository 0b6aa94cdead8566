"""Implicit Bayesian networks: random factors on the inputs of every layer [Trinh et al. 2020]."""

from .method import Implicit as Implicit
from .posterior import ImplicitPosterior as ImplicitPosterior
