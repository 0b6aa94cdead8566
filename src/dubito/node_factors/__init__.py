"""What methods with doubt on the nodes share: factors on the sides of weights, in K components."""

from .components import ComponentObjective as ComponentObjective
from .components import component_objective as component_objective
from .objective import Arrangement as Arrangement
from .objective import Drawn as Drawn
from .objective import NodeObjective as NodeObjective
from .objective import check_arrangement as check_arrangement
from .posterior import NodePosterior as NodePosterior
from .posterior import Stds as Stds
from .start import bias_names as bias_names
from .start import sites_of as sites_of
from .start import structure_of as structure_of
