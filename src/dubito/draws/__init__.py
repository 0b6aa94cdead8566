"""Draws made once: functions of a posterior, answered one by one or all in one pass."""

from .base import Draws as Draws
from .factors import FactorDraws as FactorDraws
from .linearised import LinearisedDraws as LinearisedDraws
from .linearised import deviations as deviations
from .masks import MaskDraws as MaskDraws
from .module import MixtureModule as MixtureModule
from .module import PredictiveModule as PredictiveModule
from .weights import WeightDraws as WeightDraws
from .weights import weight_stacks as weight_stacks
