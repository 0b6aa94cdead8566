"""Posteriors read from files."""

import inspect
import os
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

import torch
from torch import nn

from . import factors as factors  # whose laws a file may name
from . import storage
from .calibration import (
    TemperedBernoulli,
    TemperedBernoulliLikelihood,
    TemperedCategorical,
    TemperedCategoricalLikelihood,
)
from .errors import StorageError
from .inputs import TensorOptions
from .lazy import open_all
from .likelihoods import (
    Bernoulli,
    BernoulliLikelihood,
    Categorical,
    CategoricalLikelihood,
    CountLikelihood,
    Gaussian,
    GaussianLikelihood,
    HeteroscedasticGaussian,
    HeteroscedasticGaussianLikelihood,
    Likelihood,
    NegativeBinomial,
    NoiseNumbers,
    OwnBuiltLikelihood,
    OwnLikelihood,
    Poisson,
    StudentT,
    StudentTLikelihood,
)
from .method import Method
from .networks import copied, extra_states
from .posterior import Posterior, SampledPosterior, flagged, stored_tensors

LIKELIHOODS: dict[type, Any] = {
    Categorical: CategoricalLikelihood,
    Bernoulli: BernoulliLikelihood,
    Gaussian: GaussianLikelihood,
    HeteroscedasticGaussian: HeteroscedasticGaussianLikelihood,
    StudentT: StudentTLikelihood,
    Poisson: CountLikelihood,
    NegativeBinomial: CountLikelihood,
    OwnLikelihood: OwnBuiltLikelihood,
    TemperedCategorical: TemperedCategoricalLikelihood,
    TemperedBernoulli: TemperedBernoulliLikelihood,
}


def known_settings() -> dict[str, type]:
    """The only classes a file can name, by name: loading builds these and nothing else.

    They are the methods, the likelihoods, and what the types of their fields name, with all their subclasses: a method
    of the user's own is among them as soon as its module is imported.
    """
    open_all("dubito")
    known: dict[str, type] = {}
    kinds: list[type] = [Method, *LIKELIHOODS]
    for kind in kinds:  # grows on the way
        named = kind.__subclasses__()
        if is_dataclass(kind):
            if not _is_base(kind):
                known.setdefault(kind.__name__, kind)
            named += [part for hint in _hints(kind) for part in _classes(hint)]
        kinds += [part for part in dict.fromkeys(named) if part not in kinds]
    return known


def _is_base(kind: type) -> bool:
    """Whether settings are there for others to build on alone."""
    others = any(below.__module__.startswith("dubito.") for below in kind.__subclasses__())
    return inspect.isabstract(kind) or (issubclass(kind, Method) and others)


def _hints(kind: Any) -> list[Any]:
    """The types of a dataclass's fields; none where it names what is imported for types alone."""
    try:
        hints = get_type_hints(kind)
    except NameError:
        return []
    return [hints[item.name] for item in fields(kind)]


def _classes(hint: Any) -> Iterator[type]:
    """The classes that a type names, such as A, B and C in `A | tuple[B, C]`."""
    if inspect.isclass(hint) and hint.__module__.startswith("dubito."):
        yield hint
    for part in get_args(hint):
        yield from _classes(part)


def load(path: str | os.PathLike[str], net: nn.Module) -> Posterior:
    """The posterior saved at `path`; `net` gives the architecture and the device, and is not modified.

    Args:
        path: a file written by `posterior.save`.
        net: a network built like the one the posterior was fitted to.
    """
    tensors, content = storage.read(path, "posterior")
    network = copied(net).eval()
    try:
        known = known_settings()
        method = storage.decode(content["method"], known)
        chosen = storage.decode(content["likelihood"], known)
        if not isinstance(method, Method) or not isinstance(chosen, Likelihood):
            raise StorageError(f"{path} is altered: {method!r} and {chosen!r} are no method and likelihood")
        groups, details = content["structure"], content["details"]
        history, components = content["history"], content["num_noise_components"]
    except KeyError as error:
        raise StorageError(f"{path} is altered: its metadata lacks {error}") from error
    device = TensorOptions.of(network).device
    _fill(network, {key: value.to(device) for key, value in _part(tensors, "network").items()}, path)
    _restore(network, content.get("extra", {}), path)
    noise = {key: value.to(device) for key, value in _part(tensors, "likelihood").items()}
    noise |= {
        key: nn.Parameter(value, requires_grad=False)
        for key, value in noise.items()
        if key.startswith("raw_")
    }
    built = next(LIKELIHOODS[kind] for kind in type(chosen).__mro__ if kind in LIKELIHOODS)
    noisy = issubclass(built, (GaussianLikelihood, NoiseNumbers))
    likelihood: Any = built(chosen, **noise, **({"num_components": components} if noisy else {}))
    stored = {
        key: {name: _required(tensors, f"{key}.{name}", path).to(device) for name in names}
        for key, names in groups.items()
    }
    posterior = (SampledPosterior if "sampled" in details else type(method).posterior_type)(
        network,
        likelihood,
        method=method,
        tensors=stored,
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
    expected = stored_tensors(network)
    for name in [*expected, *stored]:
        if name not in stored or name not in expected:
            lacks, has = ("the network", "the file") if name in stored else ("the file", "the network")
            raise StorageError(f"{path} is of another architecture: {has} has {name!r}, {lacks} has not")
        if expected[name].shape != stored[name].shape:
            raise StorageError(
                f"{path} is of another architecture: {name!r} has shape {tuple(stored[name].shape)} "
                f"in the file and {tuple(expected[name].shape)} in the network"
            )
    for name, tensor in expected.items():
        if tensor.is_floating_point() and tensor.dtype != stored[name].dtype:
            network.to(stored[name].dtype)  # buffers that are not stored go along, as they do in posterior.to
            break
    for name, tensor in stored_tensors(network).items():
        tensor.data = stored[name]  # takes the stored dtype; tied tensors are one object and stay tied


def _restore(network: nn.Module, extra: Any, path: Any) -> None:
    """Give modules what they keep beside tensors."""
    expected = extra_states(network)
    for name, state in extra.items():
        if name not in expected:
            raise StorageError(
                f"{path} is of another architecture: the network's {name!r} keeps no extra state"
            )
        try:
            network.get_submodule(name).set_extra_state(state)
        except Exception as error:  # the module's own code, and a file may hold anything
            raise StorageError(f"{path}: {name!r} did not take its extra state: {error}") from error
