"""Bugs to plant: each changes one formula, raises nothing, and must make its test fail (`make mutants`)."""

from .planted import MUTANTS as MUTANTS
from .planted import Mutant as Mutant
