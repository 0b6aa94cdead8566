"""What methods with uncertainty on the nodes share: factors on the sides of weights, in K components."""

from .components import ComponentObjective as ComponentObjective
from .components import component_objective as component_objective
from .objective import Arrangement as Arrangement
from .objective import Drawn as Drawn
from .objective import NodeObjective as NodeObjective
from .objective import check_arrangement as check_arrangement
from .objective import halved as halved
from .posterior import NodePosterior as NodePosterior
from .posterior import Stds as Stds
from .start import chosen_weights as chosen_weights
from .start import surveyed as surveyed
from .start import tensors_of as tensors_of
