"""Likelihoods: frozen settings that build the small module which judges a network's outputs.

`Categorical`, `Bernoulli` and `Gaussian` are settings, shared freely. `build(example_outputs)` makes the module
`posterior.likelihood`, which holds what is learned (a Gaussian's noise), so two fits never share state.
"""

from .base import BuiltLikelihood as BuiltLikelihood
from .base import Likelihood as Likelihood
from .base import at_least_float as at_least_float
from .base import settings_of as settings_of
from .bernoulli import Bernoulli as Bernoulli
from .bernoulli import BernoulliLikelihood as BernoulliLikelihood
from .categorical import Categorical as Categorical
from .categorical import CategoricalLikelihood as CategoricalLikelihood
from .gaussian import Gaussian as Gaussian
from .gaussian import GaussianLikelihood as GaussianLikelihood
from .gaussian import inverse_softplus as inverse_softplus
