"""Natural-gradient variational inference as optimisers: usable alone, in any training loop."""

from .noisy import NoisyOptimizer as NoisyOptimizer
from .noisy_adam import NoisyAdam as NoisyAdam
from .noisy_kfac import NoisyKFAC as NoisyKFAC
from .vadam import Vadam as Vadam
from .vogn import VOGN as VOGN
