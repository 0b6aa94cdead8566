"""Independent Normals over weights: the posterior and the loss that mean field and the k-tied Normal share."""

from .objective import NormalObjective as NormalObjective
from .objective import check_stds as check_stds
from .objective import initial_raw_std as initial_raw_std
from .posterior import NormalPosterior as NormalPosterior
from .ties import initial_factors as initial_factors
from .ties import tied_ranks as tied_ranks
