"""Active learning: which labels to ask for next, and what is gained by it."""

from .acquisition import BALD as BALD
from .acquisition import Acquisition as Acquisition
from .acquisition import Entropy as Entropy
from .acquisition import LogitVariance as LogitVariance
from .acquisition import Margin as Margin
from .acquisition import OutputVariance as OutputVariance
from .acquisition import Random as Random
from .acquisition import Selection as Selection
from .acquisition import VariationRatio as VariationRatio
from .curves import Curve as Curve
from .curves import CurvePoint as CurvePoint
from .curves import MeanCurve as MeanCurve
from .curves import mean_curve as mean_curve
from .curves import paired_difference as paired_difference
from .loop import ActiveLearning as ActiveLearning
