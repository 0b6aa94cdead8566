"""The posterior every method returns, and its draws made once."""

from .base import MAX_ROWS as MAX_ROWS
from .base import Drawer as Drawer
from .base import Posterior as Posterior
from .base import Streams as Streams
from .base import detached as detached
from .fingerprint import described as described
from .mixture import MixturePosterior as MixturePosterior
from .mixture import Weighting as Weighting
from .mixture import require_evidence as require_evidence
from .sampled import SampledPosterior as SampledPosterior
from .stored import Details as Details
from .stored import FactorDetails as FactorDetails
from .stored import ShapeRule as ShapeRule
from .tensors import NamedTensors as NamedTensors
from .tensors import base_of as base_of
from .tensors import flagged as flagged
from .tensors import stored_tensors as stored_tensors
