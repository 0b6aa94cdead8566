"""Networks trained on the reduced CIFAR-10, kept in the user's cache, where every table finds them again."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dubito import MAP, Categorical, DeepEnsemble, Implicit, MeanField, Rank1
from dubito.data import Part
from dubito.method import Method
from dubito.models import vgg, vgg16, wide_resnet
from dubito.posterior import Posterior
from dubito.training import KL, SGD, Cosine, Training
from dubito.training.account import Account, accounted
from dubito.training.schedules import Schedule

from ..runner import provenance
from ..runner.trained import checkpoint as trained_at
from ..settings import explicit
from .images import Augmented, Pictures

DATA = "cifar10"
#: To be raised when a change of the code changes what training gives; networks are then trained anew.
REVISION = 1
#: Stages of the reduced VGG.
STAGES = ((24,), (48, 48), (96, 96))
#: Seeds of the further members of an ensemble start here, beyond those of cells.
FURTHER = 100


@dataclass(frozen=True, kw_only=True)
class Fit:
    """One trained network.

    Args:
        method: with its settings; an ensemble is made of the plain runs of its seeds.
        network: a Wide ResNet, the VGG of `STAGES` with batch norm, or the implicit paper's VGG-16.
        depth: of the Wide ResNet.
        width: likewise.
        base: likewise.
        size: height and width of images.
        epochs: passes over the images.
        num_images: the first so many.
        batch_size: images per step, all of which every component of a tile sees; implicit divides them.
        lr: highest learning rate of SGD with Nesterov's momentum, after an epoch in which it rises.
        schedule: of its fall.
        variational_lr: of factors and standard deviations.
        variational_schedule: likewise; None falls like the weights' rate.
        weight_decay: of the weights.
        kl_warmup: epochs over which the divergence's weight rises to 1.
        start: a training that gives the network to start from; None starts from new weights.
        kernels: whether of a mean field kernels alone are random, and biases and batch norm points: pulled to 0 by a
            prior, batch norm's factors would silence the network.
    """

    method: Method
    network: Literal["wide-resnet", "vgg", "vgg16"] = "wide-resnet"
    depth: int = 10
    width: int = 1
    base: int = 16
    size: int = 16
    epochs: int = 6
    num_images: int = 45_000
    batch_size: int = 128
    lr: float = 0.2
    schedule: Schedule = explicit(Cosine)
    variational_lr: float | None = None
    variational_schedule: Schedule | None = None
    weight_decay: float = 5e-4
    kl_warmup: float = 4.0
    start: "Fit | None" = None
    kernels: bool = False

    def training(self, steps: int | None) -> Training:
        """The run, ended after `steps` where given."""
        return explicit(
            Training,
            epochs=self.epochs if steps is None else None,
            iterations=steps,
            batch_size=self.batch_size,
            lr=self.lr,
            variational_lr=self.variational_lr,
            optimizer=explicit(SGD),
            schedule=self.schedule,
            variational_schedule=self.variational_schedule,
            warmup=1.0,
            weight_decay=self.weight_decay,
            kl=explicit(KL, warmup=self.kl_warmup),
            channels_last=True,
        )

    def built(self, seed: int) -> nn.Module:
        """The network as it starts."""
        if self.network == "wide-resnet":
            return wide_resnet(self.depth, self.width, self.base, seed=seed)
        return vgg(STAGES, (64,), batch_norm=True, seed=seed) if self.network == "vgg" else vgg16(seed=seed)

    def posterior(self, images: Pictures, seed: int, steps: int | None) -> Posterior:
        """What is trained, or found again; arguments as of `trained`."""
        return trained(self, images, seed, steps)[0]

    @property
    def plain(self) -> "Fit":
        """The point estimate of the same network and run."""
        plain = replace(self, method=explicit(MAP), variational_lr=None, variational_schedule=None)
        return replace(plain, start=None, kernels=False)


def trained(
    fit: Fit, pictures: Pictures, seed: int, steps: int | None, *, stored: bool = True, callbacks: Sequence[Any] = ()
) -> tuple[Posterior, float]:
    """A trained posterior and the CPU-seconds of all trainings behind it.

    Args:
        fit: what is trained.
        pictures: with the training images.
        seed: of the network and the run.
        steps: that end the run early, without a checkpoint; None for a whole run.
        stored: whether a whole run is kept, and found again.
        callbacks: that watch it.
    """
    if isinstance(fit.method, DeepEnsemble):
        return ensemble(fit, pictures, seed, steps)
    network, before = fit.built(seed), 0.0
    if fit.start is not None:
        first, before = trained(fit.start, pictures, seed, steps)
        network = first.fold(0).train()
    method = fit.method
    if fit.kernels:
        assert isinstance(method, MeanField)
        method = replace(method, subset=random_kernel)
    part = learned(pictures, fit.num_images)
    training, likelihood = fit.training(steps), explicit(Categorical)
    with accounted(Account()) as account:
        posterior = provenance.fit(
            method,
            network,
            Augmented(part).loader(fit.batch_size),
            likelihood,
            rows=part,
            training=training,
            checkpoint=trained_at(DATA, REVISION, fit, seed) if stored and steps is None else None,
            seed=seed,
            progress=False,
            callbacks=callbacks,
        )
        return posterior, before + account.spent()


def random_kernel(name: str, weight: Tensor) -> bool:
    """Whether a parameter is a kernel, of a convolution or a dense layer."""
    return weight.ndim > 1


def learned(pictures: Pictures, count: int) -> Part:
    """The first so many training images; validation images are among them only where all are asked for."""
    parts = [pictures.train] if count <= len(pictures.train.targets) else [pictures.train, pictures.validation]
    return Part(*(torch.cat(tensors)[:count] for tensors in zip(*parts, strict=True)))


def ensemble(fit: Fit, pictures: Pictures, seed: int, steps: int | None) -> tuple[Posterior, float]:
    """The ensemble of the seed's own plain run and of further ones that no other cell has."""
    assert isinstance(fit.method, DeepEnsemble)
    further = fit.method.members - 1
    numbers = [seed, *(FURTHER + further * seed + number for number in range(further))]
    made = [trained(fit.plain, pictures, number, steps) for number in numbers]
    networks = [posterior.fold(0) for posterior, _ in made]
    return DeepEnsemble.from_networks(networks, explicit(Categorical)), sum(seconds for _, seconds in made)


def first_std(method: Method) -> float | None:
    """Where standard deviations start; None for methods without any."""
    if isinstance(method, Rank1):
        rate = method.family.initial_rate if method.initial_rate is None else method.initial_rate
        return (rate / (1 - rate)) ** 0.5
    return method.initial_std if isinstance(method, Implicit | MeanField) else None


def last_std(posterior: Posterior) -> float | None:
    """The median of all standard deviations."""
    if first_std(posterior.method) is None:
        return None
    return float(torch.cat([std.flatten() for std in posterior.standard_deviations()]).median())
