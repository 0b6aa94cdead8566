"""Post-hoc calibration: temperatures, scales, sets and intervals with a guarantee, when to abstain."""

from ..metrics.paired import paired_gain as paired_gain
from .abstention import Abstention as Abstention
from .abstention import SelectiveRisk as SelectiveRisk
from .conformal import APS as APS
from .conformal import LAC as LAC
from .conformal import ConformalSets as ConformalSets
from .intervals import ConformalIntervals as ConformalIntervals
from .intervals import QuantileResiduals as QuantileResiduals
from .intervals import ScaledResiduals as ScaledResiduals
from .scale import chosen_scale as chosen_scale
from .scale import posterior_scaled as posterior_scaled
from .temperature import temperature_scaled as temperature_scaled
from .tempered import TemperedBernoulli as TemperedBernoulli
from .tempered import TemperedBernoulliLikelihood as TemperedBernoulliLikelihood
from .tempered import TemperedCategorical as TemperedCategorical
from .tempered import TemperedCategoricalLikelihood as TemperedCategoricalLikelihood
