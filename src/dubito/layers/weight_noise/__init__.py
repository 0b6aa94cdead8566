"""Noise in weights, and the estimators that put it there or onto the outputs of layers."""

from .estimators import Estimator as Estimator
from .estimators import Flipout as Flipout
from .estimators import LocalReparameterised as LocalReparameterised
from .estimators import NoisyLayer as NoisyLayer
from .estimators import Placement as Placement
from .estimators import Reparameterised as Reparameterised
from .estimators import check_estimator as check_estimator
from .estimators import place as place
from .functions import full_precision as full_precision
from .outputs import Moments as Moments
from .outputs import flipped_noise as flipped_noise
from .outputs import local_noise as local_noise
from .rows import RowStreams as RowStreams
from .spreads import OwnSpread as OwnSpread
from .spreads import Spread as Spread
from .spreads import TiedSpread as TiedSpread
from .spreads import TrainedSpread as TrainedSpread
from .spreads import TruncatedSpread as TruncatedSpread
from .terms import summed as summed
