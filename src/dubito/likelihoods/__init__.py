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
from .counts import CountLikelihood as CountLikelihood
from .counts import NegativeBinomial as NegativeBinomial
from .counts import Poisson as Poisson
from .gaussian import Gaussian as Gaussian
from .gaussian import GaussianLikelihood as GaussianLikelihood
from .noise import NoiseNumbers as NoiseNumbers
from .noise import RealLikelihood as RealLikelihood
from .noise import inverse_softplus as inverse_softplus
from .own import OwnBuiltLikelihood as OwnBuiltLikelihood
from .own import OwnLikelihood as OwnLikelihood
from .student_t import HeteroscedasticGaussian as HeteroscedasticGaussian
from .student_t import HeteroscedasticGaussianLikelihood as HeteroscedasticGaussianLikelihood
from .student_t import StudentT as StudentT
from .student_t import StudentTLikelihood as StudentTLikelihood
