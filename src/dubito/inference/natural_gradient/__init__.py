"""Natural-gradient variational inference: Noisy Adam, Vadam, VOGN, Noisy K-FAC."""

from .methods import VOGN as VOGN
from .methods import NaturalGradient as NaturalGradient
from .methods import NoisyAdam as NoisyAdam
from .methods import NoisyKFAC as NoisyKFAC
from .methods import Vadam as Vadam
from .posterior import NaturalPosterior as NaturalPosterior
