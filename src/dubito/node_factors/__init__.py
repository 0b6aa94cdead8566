"""What methods with doubt on the nodes share: factors on the sides of weights, in K components."""

from .components import ComponentObjective as ComponentObjective
from .components import component_objective as component_objective
from .noise import halved as halved
from .objective import Arrangement as Arrangement
from .objective import Drawn as Drawn
from .objective import NodeObjective as NodeObjective
from .objective import check_arrangement as check_arrangement
from .posterior import NodePosterior as NodePosterior
from .posterior import Stds as Stds
from .start import chosen_weights as chosen_weights
from .start import surveyed as surveyed
from .start import tensors_of as tensors_of
from .weights import bias_names as bias_names
from .weights import points_of as points_of
from .weights import reading_inputs as reading_inputs
from .weights import shared_weights as shared_weights
from .weights import stored_uses as stored_uses
from .weights import weights_with_nodes as weights_with_nodes
