"""dubito: compact Bayesian neural networks for PyTorch.

data -> method.fit(net, data, likelihood) -> posterior -> posterior.predict(inputs) -> prediction
"""

from typing import TYPE_CHECKING

from .lazy import attach

if TYPE_CHECKING:
    from . import active as active
    from . import calibration as calibration
    from . import compare as compare
    from . import data as data
    from . import diagnostics as diagnostics
    from . import factors as factors
    from . import models as models
    from . import optim as optim
    from . import plot as plot
    from . import protocol as protocol
    from . import shifts as shifts
    from .curvature import GGN as GGN
    from .curvature import Empirical as Empirical
    from .curvature import Fisher as Fisher
    from .errors import ConfigError as ConfigError
    from .errors import DataError as DataError
    from .errors import DubitoError as DubitoError
    from .errors import DubitoWarning as DubitoWarning
    from .errors import Interrupted as Interrupted
    from .errors import NetworkError as NetworkError
    from .errors import ProcessError as ProcessError
    from .errors import StorageError as StorageError
    from .errors import Terminated as Terminated
    from .errors import TrainingError as TrainingError
    from .errors import UnknownNameError as UnknownNameError
    from .inference.bali import BALI as BALI
    from .inference.batch_ensemble import BatchEnsemble as BatchEnsemble
    from .inference.deep_ensemble import DeepEnsemble as DeepEnsemble
    from .inference.hmc import HMC as HMC
    from .inference.implicit import Implicit as Implicit
    from .inference.k_tied import KTied as KTied
    from .inference.laplace import EFB as EFB
    from .inference.laplace import INF as INF
    from .inference.laplace import KFAC as KFAC
    from .inference.laplace import Diagonal as Diagonal
    from .inference.laplace import Laplace as Laplace
    from .inference.laplace import OnlineEvidence as OnlineEvidence
    from .inference.laplace import last_layer as last_layer
    from .inference.map import MAP as MAP
    from .inference.mc_dropout import MCDropout as MCDropout
    from .inference.mean_field import MeanField as MeanField
    from .inference.natural_gradient import VOGN as VOGN
    from .inference.natural_gradient import NoisyAdam as NoisyAdam
    from .inference.natural_gradient import NoisyKFAC as NoisyKFAC
    from .inference.natural_gradient import Vadam as Vadam
    from .inference.pbp import PBP as PBP
    from .inference.rank1 import Rank1 as Rank1
    from .inference.swag import SWA as SWA
    from .inference.swag import SWAG as SWAG
    from .likelihoods import Bernoulli as Bernoulli
    from .likelihoods import Categorical as Categorical
    from .likelihoods import Gaussian as Gaussian
    from .likelihoods import HeteroscedasticGaussian as HeteroscedasticGaussian
    from .likelihoods import NegativeBinomial as NegativeBinomial
    from .likelihoods import OwnLikelihood as OwnLikelihood
    from .likelihoods import Poisson as Poisson
    from .likelihoods import StudentT as StudentT
    from .loading import load as load
    from .priors import Around as Around
    from .priors import He as He
    from .registry import methods as methods
    from .sources import Labelled as Labelled
    from .training import Callback as Callback
    from .training import Training as Training
    from .version import __version__ as __version__
    from .weight_normals import Flipout as Flipout
    from .weight_normals import LocalReparameterised as LocalReparameterised
    from .weight_normals import Reparameterised as Reparameterised

#: Where the names lie that type checkers read above; a test holds the two together.
_NAMES = {
    "curvature": ("GGN", "Empirical", "Fisher"),
    "errors": (
        "ConfigError",
        "DataError",
        "DubitoError",
        "DubitoWarning",
        "Interrupted",
        "NetworkError",
        "ProcessError",
        "StorageError",
        "Terminated",
        "TrainingError",
        "UnknownNameError",
    ),
    "inference.bali": ("BALI",),
    "inference.batch_ensemble": ("BatchEnsemble",),
    "inference.deep_ensemble": ("DeepEnsemble",),
    "inference.hmc": ("HMC",),
    "inference.implicit": ("Implicit",),
    "inference.k_tied": ("KTied",),
    "inference.laplace": ("EFB", "INF", "KFAC", "Diagonal", "Laplace", "OnlineEvidence", "last_layer"),
    "inference.map": ("MAP",),
    "inference.mc_dropout": ("MCDropout",),
    "inference.mean_field": ("MeanField",),
    "inference.natural_gradient": ("VOGN", "NoisyAdam", "NoisyKFAC", "Vadam"),
    "inference.pbp": ("PBP",),
    "inference.rank1": ("Rank1",),
    "inference.swag": ("SWA", "SWAG"),
    "likelihoods": (
        "Bernoulli",
        "Categorical",
        "Gaussian",
        "HeteroscedasticGaussian",
        "NegativeBinomial",
        "OwnLikelihood",
        "Poisson",
        "StudentT",
    ),
    "priors": ("Around", "He"),
    "loading": ("load",),
    "registry": ("methods",),
    "sources": ("Labelled",),
    "training": ("Callback", "Training"),
    "version": ("__version__",),
    "weight_normals": ("Flipout", "LocalReparameterised", "Reparameterised"),
}
_ROOMS = (
    "active", "calibration", "compare", "data", "diagnostics", "factors", "models", "optim", "plot",
    "protocol", "shifts",
)  # fmt: skip
__getattr__, __dir__, __all__ = attach(__name__, _NAMES, _ROOMS)
