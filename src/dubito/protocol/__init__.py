"""One protocol for all methods: pilots, starts, early stopping, and what validation rows choose afterwards."""

from .recipes import Pilot as Pilot
from .recipes import Recipe as Recipe
from .recipes import recipe as recipe
from .run import fit as fit
from .run import pilot_of as pilot_of
