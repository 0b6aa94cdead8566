"""Draws made once: functions of a posterior, answered one by one or all in one pass."""

from .base import Draws as Draws
from .base import restored as restored
from .factors import FactorDraws as FactorDraws
from .factors import tiled as tiled
from .linearised import LinearisedDraws as LinearisedDraws
from .masks import MaskDraws as MaskDraws
from .module import PredictiveModule as PredictiveModule
from .weights import WeightDraws as WeightDraws
