"""Posteriors read from files."""

import inspect
import os
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, NotRequired, TypedDict, get_args

import torch
from torch import Tensor, nn

from . import factors as factors  # whose laws a file may name
from . import storage
from .calibration import (
    TemperedBernoulli,
    TemperedBernoulliLikelihood,
    TemperedCategorical,
    TemperedCategoricalLikelihood,
)
from .errors import StorageError
from .hints import checked
from .inputs import TensorOptions
from .layers.tree import is_shared
from .lazy import open_all
from .likelihoods import (
    Bernoulli,
    BernoulliLikelihood,
    BuiltLikelihood,
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
from .networks import copied, duplicate, extra_states
from .posterior import MixturePosterior, Posterior, SampledPosterior, base_of, flagged, stored_tensors
from .posterior.fingerprint import check_fingerprint
from .posterior.stored import MixtureDetails, check_details, check_draws, check_tensors, restored
from .priors import Around
from .storage.schema import LARGEST, Recorded, Size, conform, settings_hints

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
            named += [part for hint in _field_types(kind) for part in _classes(hint)]
        kinds += [part for part in dict.fromkeys(named) if part not in kinds]
    return known


def _is_base(kind: type) -> bool:
    """Whether settings are there for others to build on alone."""
    others = any(below.__module__.startswith("dubito.") for below in kind.__subclasses__())
    return inspect.isabstract(kind) or (issubclass(kind, Method) and others)


def _field_types(kind: Any) -> list[Any]:
    hints = settings_hints(kind)
    return [hints[item.name] for item in fields(kind) if item.name in hints]


def _classes(hint: Any) -> Iterator[type]:
    """The classes that a type names, such as A, B and C in `A | tuple[B, C]`."""
    if inspect.isclass(hint) and hint.__module__.startswith("dubito."):
        yield hint
    for part in get_args(hint):
        yield from _classes(part)


class Content(TypedDict):
    """What a file holds of a posterior beside its tensors."""

    method: dict[str, Any]
    likelihood: dict[str, Any]
    num_noise_components: Size
    structure: dict[str, list[str]]
    details: dict[str, Any]
    history: list[dict[str, Recorded | None]]
    extra: NotRequired[dict[str, Any]]
    fingerprint: NotRequired[dict[str, Any] | None]
    components: NotRequired[list[dict[str, Any]]]
    base: NotRequired[list[str]]


@checked
def load(path: str | os.PathLike[str], net: nn.Module, *, fingerprint: bool = True) -> Posterior:
    """The posterior saved at `path`; `net` gives the architecture and the device, and is not modified.

    What does not fit is refused before anything is built: see [files](storage.md).

    Args:
        path: a file written by `posterior.save`.
        net: a network built like the one the posterior was fitted to. What was frozen there must be the same here; the
            posterior shares its memory.
        fingerprint: whether the network must answer fixed inputs as the one did that was saved.
    """
    tensors, content = storage.read(path, "posterior")
    stored = _part(tensors, "network") or _part(tensors, "component0.network")
    shared = isinstance(content, dict) and content.get("base")
    network = copied(net, [n for n, _ in net.named_parameters() if n not in stored] if shared else ()).eval()
    try:
        posterior = _restored(tensors, content, network)
        _check_base(content.get("base", []), network, path)
        if fingerprint and content.get("fingerprint") is not None:
            outputs = check_fingerprint(
                content["fingerprint"], posterior.network, posterior.details.get("inputs"), path
            )
            restored(posterior.likelihood.check_outputs, outputs, "the likelihood's noise")
    except StorageError as error:
        known = str(error)
        raise error if str(path) in known else StorageError(f"{path} is altered: {known}") from error
    return posterior


def _restored(
    tensors: dict[str, Tensor], content: Any, network: nn.Module, mixed: BuiltLikelihood | None = None
) -> Posterior:
    """The posterior of tensors and plain facts, each looked at before it is used; `mixed` is that of a mixture."""
    conform(content, Content, "its content")
    known = known_settings()
    settings = []
    for key, kind in (("method", Method), ("likelihood", Likelihood)):
        settings.append(storage.decode(content[key], known))
        conform(settings[-1], kind, f"the {key}")
    method, chosen = settings
    prior = getattr(getattr(method, "beside", None) or method, "prior", None)
    if isinstance(prior, Around):
        names = {name for name, p in network.named_parameters() if not is_shared(p)}
        prior.known(network, flagged(network) or names)
    if "components" in content and mixed is None:
        return _mixture(tensors, content, network, method, chosen)
    named = {key: [f"{key}.{name}" for name in names] for key, names in content["structure"].items()}
    _check_names(tensors, named)
    device = TensorOptions.of(network).device
    placed = {name: tensor.to(device) for name, tensor in tensors.items()}
    _fill(network, _part(placed, "network"))
    _restore(network, content.get("extra", {}))
    likelihood = mixed or _likelihood(chosen, _part(placed, "likelihood"), content["num_noise_components"])
    details = content["details"]
    kind: Any = SampledPosterior if "sampled" in details else type(method).posterior_type
    check_details(kind, details, network)
    stored = {key: {name[len(key) + 1 :]: placed[name] for name in names} for key, names in named.items()}

    def build(groups: Any) -> Posterior:
        return kind(
            network,
            likelihood,
            method=method,
            tensors=groups,
            details=details,
            history=content["history"],
            trainable=stored_tensors(network, shared=False).keys() & dict(network.named_parameters())
            if content.get("base")
            else flagged(network),
        ).finished()

    posterior = restored(build, stored, f"the posterior of {type(method).__name__}")
    check_tensors(posterior)
    check_draws(posterior)
    return posterior


def _mixture(
    tensors: dict[str, Tensor], content: Any, network: nn.Module, method: Method, chosen: Likelihood
) -> Posterior:
    """The mixture of components, each restored as a posterior; what the first holds for all is stored once."""
    details, like = content["details"], TensorOptions.of(network)
    conform(details, MixtureDetails, "details")
    noise = {name: tensor.to(like.device) for name, tensor in _part(tensors, "likelihood").items()}
    likelihood = _likelihood(chosen, noise, content["num_noise_components"])
    keys = ["likelihood", *(f"component{number}" for number in range(len(content["components"])))]
    if len(keys) < 2 or any(name.partition(".")[0] not in keys for name in tensors):
        raise StorageError(f"the tensors must be those of {len(keys) - 1} components, got others, or none")
    parts, first = [], {}
    for key, inner in zip(keys[1:], content["components"], strict=True):
        conform(inner, Content, key)
        inner = {**inner, "base": content.get("base", [])}
        names = {f"{group}.{name}" for group, some in inner["structure"].items() for name in some}
        shared = {name: t for name, t in first.items() if name in names or name.startswith("network.")}
        stored = {**shared, **_part(tensors, key)}
        first = first or stored
        parts.append(_restored(stored, inner, duplicate(network), likelihood))
    facts = {"method": method, "details": details, "history": content["history"]}
    return restored(lambda some: MixturePosterior(some, likelihood, **facts), parts, "the mixture").finished()


def _check_names(tensors: dict[str, Tensor], named: dict[str, list[str]]) -> None:
    """Refuse tensors that are missing, twice, of no group, or of a dtype that is none of PyTorch's plain ones."""
    reserved = [key for key in named if key in ("network", "likelihood")]
    listed = [name for names in named.values() for name in names]
    others = [name for name in tensors if name.partition(".")[0] not in ("network", "likelihood")]
    if reserved or sorted(listed) != sorted(others):
        different = [*reserved, *sorted({*listed} ^ {*others}), *listed][0]
        raise StorageError(f"the tensors and the list of their names differ in {different!r}")


def _likelihood(chosen: Any, noise: dict[str, Tensor], components: int) -> Any:
    """The built likelihood, after checking that its noise is one."""
    built = next(LIKELIHOODS[kind] for kind in type(chosen).__mro__ if kind in LIKELIHOODS)
    for key, tensor in noise.items():
        if not tensor.is_floating_point() or not (tensor.abs() <= LARGEST).all():
            raise StorageError(f"the noise's {key} must hold finite numbers of at most {LARGEST:g}")
        if key.startswith("raw_"):
            noise[key] = nn.Parameter(tensor, requires_grad=False)
    if issubclass(built, GaussianLikelihood):
        _check_gaussian(noise, components)
    else:
        needed, optional = built.names_of(chosen) if issubclass(built, NoiseNumbers) else ((), ())
        _check_noise(noise, needed, optional, components)
    extra: Any = {"num_components": components} if issubclass(built, GaussianLikelihood | NoiseNumbers) else {}
    return restored(lambda settings: built(settings, **noise, **extra), chosen, "the likelihood")


def _check_noise(noise: dict[str, Tensor], needed: tuple[str, ...], optional: tuple[str, ...], components: int) -> None:
    """Refuse numbers per output that are missing, of no use, not positive, or not of so many components."""
    names = [key.removeprefix("raw_") for key in noise]
    if len({*names}) != len(names) or not {*needed} <= {*names} <= {*needed, *optional}:
        raise StorageError(f"the noise must hold {list(needed)}, and may {list(optional)}, got {[*noise]}")
    if not needed and components != 1:
        raise StorageError(f"noise that the outputs tell has no components of its own, got {components}")
    for key, tensor in noise.items():
        fixed = not key.startswith("raw_") and key != "location"
        if fixed and not (tensor > 0).all():
            raise StorageError(f"the noise's {key} must be above 0")
        if components > 1 and fixed and key in needed and (tensor.ndim == 0 or len(tensor) != components):
            raise StorageError(f"the noise's {key} must have {components} components, got {tuple(tensor.shape)}")
    if noise.keys() & {"location", "scale"} and (
        "location" not in noise or "scale" not in noise or noise["location"].shape != noise["scale"].shape
    ):
        raise StorageError("the targets' location and scale must be there together, in one shape")


def _check_gaussian(noise: dict[str, Tensor], components: int) -> None:
    """Refuse Normal noise that is not of one form, not positive, or of another number of components."""
    forms, units = ([key for key in ("raw_std", "noise_std", "scale_tril") if key in noise], {"location", "scale"})
    if len(forms) != 1 or {*noise} - {*forms} not in (set(), units):
        raise StorageError(f"the noise must have one form, with a location and a scale or neither, got {[*noise]}")
    values = noise[forms[0]]
    if forms == ["scale_tril"]:
        shape = (*([components] if components > 1 else []), *values.shape[-1:] * 2)
        fits, values = (tuple(values.shape) == shape, values.diagonal(dim1=-2, dim2=-1) if values.ndim > 1 else values)
    else:
        fits = components == 1 or (values.ndim > 0 and len(values) == components)
    if not fits:
        raise StorageError(f"the noise must have {components} components, got {tuple(noise[forms[0]].shape)}")
    if forms != ["raw_std"] and not (values > 0).all():
        raise StorageError("the noise's standard deviations must be above 0")
    if "scale" in noise and (noise["location"].shape != noise["scale"].shape or not (noise["scale"] > 0).all()):
        raise StorageError("the scale of targets must be above 0, and have the shape of their location")


def _part(tensors: dict[str, Tensor], key: str) -> dict[str, Tensor]:
    return {name[len(key) + 1 :]: tensor for name, tensor in tensors.items() if name.startswith(f"{key}.")}


def _check_base(base: list[str], network: nn.Module, path: str | os.PathLike[str]) -> None:
    """Refuse a base that is not the one that the posterior was fitted around."""
    now = base_of(network)
    different = [name for name, known in zip(now, base, strict=False) if now[name] != known]
    if different or len(now) != len(base):
        names = [storage.json_checksum(checksums)[:16] for checksums in (base, list(now.values()))]
        such = f", such as {different[0]!r}, {now[different[0]]} here" if different else ""
        raise StorageError(
            f"{path} belongs to another base: {names[0]} of {len(base)} frozen parameters in the file, {names[1]} of "
            f"{len(now)} in the network; {len(different)} differ{such}; give the network with the pretrained weights "
            "that was fitted"
        )


def _fill(network: nn.Module, stored: dict[str, Tensor]) -> None:
    """Put stored weights and buffers into the network, after checking that the architectures agree."""
    expected = stored_tensors(network, shared=False)
    for name in [*expected, *stored]:
        if name not in stored or name not in expected:
            lacks, has = ("the network", "the file") if name in stored else ("the file", "the network")
            raise StorageError(f"it is of another architecture: {has} has {name!r}, {lacks} has not")
        if expected[name].shape != stored[name].shape:
            raise StorageError(
                f"it is of another architecture: {name!r} has shape {tuple(stored[name].shape)} "
                f"in the file and {tuple(expected[name].shape)} in the network"
            )
        _check_numbers(name, stored[name], expected[name])
    real = {name: tensor.dtype for name, tensor in stored.items() if tensor.is_floating_point()}
    if any(expected[name].dtype != dtype for name, dtype in real.items()):
        if len({*real.values()}) > 1:
            raise StorageError("its weights have several dtypes, which are not those of the network")
        network.to(next(iter(real.values())))  # buffers that are not stored go along, as they do in posterior.to
    for name, tensor in stored_tensors(network, shared=False).items():
        tensor.data = stored[name]  # takes the stored dtype; tied tensors are one object and stay tied


def _check_numbers(name: str, stored: Tensor, expected: Tensor) -> None:
    """Refuse NaN and infinity where the network has none (a mask may), and numbers of another kind."""
    real = stored.is_floating_point()
    if real != expected.is_floating_point() or (not real and stored.dtype != expected.dtype):
        raise StorageError(f"{name!r} holds {stored.dtype}, and {expected.dtype} in the network")
    if name.endswith("running_var") and (stored < 0).any():
        raise StorageError(f"{name!r} must not be negative")
    if real and not torch.equal(stored.isfinite(), expected.isfinite()):
        raise StorageError(f"{name!r} holds NaN or infinity, where the network has numbers")


def _restore(network: nn.Module, extra: dict[str, Any]) -> None:
    """Give modules what they keep beside tensors."""
    expected = extra_states(network)
    for name, state in extra.items():
        if name not in expected:
            raise StorageError(f"it is of another architecture: the network's {name!r} keeps no extra state")
        try:
            network.get_submodule(name).set_extra_state(state)
        except Exception as error:  # the module's own code, and a file may hold anything
            raise StorageError(f"{name!r} did not take its extra state: {error}") from error
