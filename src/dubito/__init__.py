"""dubito: compact Bayesian neural networks for PyTorch.

data -> method.fit(net, data, likelihood) -> posterior -> posterior.predict(inputs) -> prediction
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from . import factors as factors
from . import optim as optim
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
from .inference.laplace import last_layer as last_layer
from .inference.map import MAP as MAP
from .inference.mc_dropout import MCDropout as MCDropout
from .inference.mean_field import MeanField as MeanField
from .inference.natural_gradient import VOGN as VOGN
from .inference.natural_gradient import NoisyAdam as NoisyAdam
from .inference.natural_gradient import NoisyKFAC as NoisyKFAC
from .inference.natural_gradient import Vadam as Vadam
from .inference.rank1 import Rank1 as Rank1
from .inference.swag import SWA as SWA
from .inference.swag import SWAG as SWAG
from .likelihoods import Bernoulli as Bernoulli
from .likelihoods import Categorical as Categorical
from .likelihoods import Gaussian as Gaussian
from .priors import He as He
from .registry import load as load
from .registry import methods as methods
from .training import Training as Training
from .version import __version__ as __version__
from .weight_normals import Flipout as Flipout
from .weight_normals import LocalReparameterised as LocalReparameterised
from .weight_normals import Reparameterised as Reparameterised

if TYPE_CHECKING:
    from . import active as active
    from . import calibration as calibration
    from . import compare as compare
    from . import data as data
    from . import diagnostics as diagnostics
    from . import models as models
    from . import plot as plot
    from . import shifts as shifts

#: Rooms that are opened when they are first asked for, as `dubito.data`, so that `import dubito` stays light.
_LATER = (
    "active", "calibration", "compare", "data", "diagnostics", "models", "plot", "shifts",
)  # fmt: skip


def __getattr__(name: str) -> ModuleType:
    if name in _LATER:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
