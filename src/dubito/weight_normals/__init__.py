"""Independent Normals over weights: what mean field and the k-tied Normal share."""

from .estimators import Estimator as Estimator
from .estimators import Flipout as Flipout
from .estimators import LocalReparameterised as LocalReparameterised
from .estimators import Reparameterised as Reparameterised
from .estimators import check_estimator as check_estimator
from .method import NormalMethod as NormalMethod
from .noise import FlippedNoise as FlippedNoise
from .noise import LocalNoise as LocalNoise
from .normals import GROUPS as GROUPS
from .normals import Normals as Normals
from .objective import NormalObjective as NormalObjective
from .objective import check_stds as check_stds
from .objective import initial_raw_std as initial_raw_std
from .posterior import NormalPosterior as NormalPosterior
from .ties import initial_factors as initial_factors
from .ties import tied_ranks as tied_ranks
