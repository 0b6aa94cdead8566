"""All methods by their command-line names, and loading of what they made."""

import os
from typing import Any

import torch
from torch import nn

from . import storage
from .calibration import (
    TemperedBernoulli,
    TemperedBernoulliLikelihood,
    TemperedCategorical,
    TemperedCategoricalLikelihood,
)
from .curvature import GGN, Empirical, Fisher
from .errors import StorageError, unknown_name
from .factors import Cauchy, HalfCauchy, InverseGamma, LogNormal, NearOne, Normal, Point, Signs
from .inference.bali import BALI
from .inference.batch_ensemble import BatchEnsemble
from .inference.deep_ensemble import DeepEnsemble
from .inference.hmc import HMC
from .inference.implicit import Implicit
from .inference.k_tied import KTied
from .inference.laplace import EFB, INF, KFAC, Diagonal, Laplace
from .inference.mc_dropout import MCDropout
from .inference.mean_field import MeanField
from .inference.natural_gradient import VOGN, NoisyAdam, NoisyKFAC, Vadam
from .inference.point import MAP
from .inference.rank1 import Rank1
from .inference.swag import SWA, SWAG
from .inputs import Place
from .likelihoods import (
    Bernoulli,
    BernoulliLikelihood,
    Categorical,
    CategoricalLikelihood,
    Gaussian,
    GaussianLikelihood,
    Likelihood,
)
from .method import Method
from .networks import copied, extra_states
from .posterior import Posterior, flagged, stored_tensors
from .priors import He
from .training import Constant, Cosine, Linear, Step
from .weight_normals import Flipout, LocalReparameterised, Reparameterised


class Methods(dict[str, Method]):
    """Methods by name; asking for an unknown one lists the known."""

    def __missing__(self, name: object) -> Method:
        raise unknown_name("method", name, self)


def methods() -> Methods:
    """Every method under its command-line name, as a frozen default instance (vary with `dataclasses.replace`)."""
    return Methods(
        {
            "map": MAP(),
            "mc-dropout": MCDropout(),
            "deep-ensemble": DeepEnsemble(),
            "swa": SWA(),
            "swag": SWAG(),
            "mean-field": MeanField(),
            "k-tied": KTied(),
            "batch-ensemble": BatchEnsemble(),
            "rank1": Rank1(),
            "implicit": Implicit(),
            # The paper's for a table of classes (its Table 5, Spam): the defaults, its regression tables', want the
            # large batches they were found with.
            "bali": BALI(step_size=0.1, update_rate=0.1, prior_scale=10.0),
            "noisy-adam": NoisyAdam(),
            "vadam": Vadam(),
            "vogn": VOGN(),
            "noisy-kfac": NoisyKFAC(),
            "laplace-diag": Laplace(structure=Diagonal()),
            "laplace-kfac": Laplace(structure=KFAC()),
            "laplace-efb": Laplace(structure=EFB()),
            "laplace-inf": Laplace(structure=INF()),
        }
    )


#: The only classes a file can name: loading builds these and nothing else.
SETTINGS: dict[str, type] = {
    cls.__name__: cls
    for cls in (
        MAP,
        MCDropout,
        DeepEnsemble,
        SWA,
        SWAG,
        HMC,
        MeanField,
        KTied,
        BatchEnsemble,
        Rank1,
        Implicit,
        Normal,
        Cauchy,
        LogNormal,
        HalfCauchy,
        InverseGamma,
        Point,
        NearOne,
        Signs,
        Reparameterised,
        LocalReparameterised,
        Flipout,
        BALI,
        NoisyAdam,
        Vadam,
        VOGN,
        NoisyKFAC,
        Step,
        Constant,
        Cosine,
        Linear,
        Laplace,
        Diagonal,
        KFAC,
        EFB,
        INF,
        Fisher,
        GGN,
        Empirical,
        He,
        Categorical,
        Bernoulli,
        Gaussian,
        TemperedCategorical,
        TemperedBernoulli,
    )
}
LIKELIHOODS: dict[type, Any] = {
    Categorical: CategoricalLikelihood,
    Bernoulli: BernoulliLikelihood,
    Gaussian: GaussianLikelihood,
    TemperedCategorical: TemperedCategoricalLikelihood,
    TemperedBernoulli: TemperedBernoulliLikelihood,
}


def load(path: str | os.PathLike[str], net: nn.Module) -> Posterior:
    """The posterior saved at `path`; `net` gives the architecture and the device, and is not modified.

    Args:
        path: a file written by `posterior.save`.
        net: a network built like the one the posterior was fitted to.
    """
    tensors, content = storage.read(path, "posterior")
    network = copied(net).eval()
    try:
        method = storage.decode(content["method"], SETTINGS)
        settings = storage.decode(content["likelihood"], SETTINGS)
        if not isinstance(method, Method) or not isinstance(settings, Likelihood):
            raise StorageError(f"{path} is altered: {method!r} and {settings!r} are no method and likelihood")
        groups, details = content["structure"], content["details"]
        history, components = content["history"], content["num_noise_components"]
    except KeyError as error:
        raise StorageError(f"{path} is altered: its metadata lacks {error}") from error
    device = Place.of(network).device
    _fill(network, {key: value.to(device) for key, value in _part(tensors, "network").items()}, path)
    _restore(network, content.get("extra", {}), path)
    noise = {key: value.to(device) for key, value in _part(tensors, "likelihood").items()}
    if "raw_std" in noise:
        noise["raw_std"] = nn.Parameter(noise["raw_std"], requires_grad=False)
    extra = {"num_components": components} if settings.__class__ is Gaussian else {}
    likelihood = LIKELIHOODS[type(settings)](settings, **noise, **extra)
    structure = {
        key: {name: _required(tensors, f"{key}.{name}", path).to(device) for name in names}
        for key, names in groups.items()
    }
    posterior = type(method).posterior_type(
        network,
        likelihood,
        method=method,
        structure=structure,
        details=details,
        history=history,
        trainable=flagged(network),
    )
    return posterior.finished()


def _part(tensors: dict[str, torch.Tensor], key: str) -> dict[str, torch.Tensor]:
    return {name[len(key) + 1 :]: tensor for name, tensor in tensors.items() if name.startswith(f"{key}.")}


def _required(tensors: dict[str, torch.Tensor], name: str, path: Any) -> torch.Tensor:
    if name not in tensors:
        raise StorageError(f"{path} is altered: it lacks the tensor {name!r}")
    return tensors[name]


def _fill(network: nn.Module, stored: dict[str, torch.Tensor], path: Any) -> None:
    """Put stored weights and buffers into the network, after checking that the architectures agree."""
    own = stored_tensors(network)
    for name in [*own, *stored]:
        if name not in stored or name not in own:
            lacks, has = ("the network", "the file") if name in stored else ("the file", "the network")
            raise StorageError(f"{path} is of another architecture: {has} has {name!r}, {lacks} has not")
        if own[name].shape != stored[name].shape:
            raise StorageError(
                f"{path} is of another architecture: {name!r} has shape {tuple(stored[name].shape)} "
                f"in the file and {tuple(own[name].shape)} in the network"
            )
    for name, tensor in own.items():
        if tensor.is_floating_point() and tensor.dtype != stored[name].dtype:
            network.to(stored[name].dtype)  # buffers that are not stored go along, as they do in posterior.to
            break
    for name, tensor in stored_tensors(network).items():
        tensor.data = stored[name]  # takes the stored dtype; tied tensors are one object and stay tied


def _restore(network: nn.Module, extra: Any, path: Any) -> None:
    """Give modules what they keep beside tensors."""
    own = extra_states(network)
    for name, state in extra.items():
        if name not in own:
            raise StorageError(
                f"{path} is of another architecture: the network's {name!r} keeps no extra state"
            )
        try:
            network.get_submodule(name).set_extra_state(state)
        except Exception as error:  # the module's own code, and a file may hold anything
            raise StorageError(f"{path}: {name!r} did not take its extra state: {error}") from error
