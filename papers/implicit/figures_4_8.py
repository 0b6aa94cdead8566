"""The implicit paper's Figures 4 and 8 on Fashion-MNIST: error by width, and doubt under noise in the images."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise

from torch import Tensor

from dubito import MAP, MCDropout, MeanField
from dubito.shifts import gaussian_mixed, salt_and_pepper

from ..runner.experiment import Cell, Claim, Metric, Outcome, Table
from ..settings import explicit
from .fashion import (
    DATA,
    DIFFERS,
    IMAGES,
    IMPLICIT,
    Clothes,
    Fit,
    Images,
    Judged,
    experiment,
    predicted,
    small,
    tested,
    trained,
)

WIDTHS = (1, 2, 4, 8)
LEVELS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
Noises = Mapping[str, Callable[..., Tensor]]
NOISES: Noises = {"gaussian": gaussian_mixed, "salt-and-pepper": salt_and_pepper}
METHODS = {"implicit": IMPLICIT, "mean-field": explicit(MeanField, prior_std=1.0), "plain": explicit(MAP)}
DOUBTS = ("total", "aleatoric", "epistemic")


def run_width(cell: Cell, clothes: Clothes, settings: Judged, steps: int | None) -> Outcome:
    """Error of the test images."""
    posterior = trained(settings.fit, clothes, cell.seed, steps)
    inputs, labels = (tensor[: settings.num_test] for tensor in clothes.test)
    prediction = predicted(posterior, inputs, steps or settings.num_samples, cell.seed)
    own = posterior.network.parameters()
    return Outcome(
        metrics=tested(prediction, labels),
        details={"network_parameters": sum(p.numel() for p in own), "parameters": posterior.num_parameters},
    )


def run_noise(cell: Cell, clothes: Images, settings: Judged, steps: int | None, noises: Noises = NOISES) -> Outcome:
    """Mean entropies at every level of the noise that the cell's data is named after."""
    posterior = trained(settings.fit, clothes, cell.seed, steps)
    inputs, labels = (tensor[: settings.num_test] for tensor in clothes.test)
    curves: dict[str, list[float]] = {name: [] for name in (*DOUBTS, "error")}
    for level in LEVELS:
        images = noises[cell.data](inputs, level, seed=cell.seed)
        prediction = predicted(posterior, images, steps or settings.num_samples, cell.seed)
        for name in DOUBTS:
            curves[name].append(float(getattr(prediction, name).double().mean()))
        curves["error"].append(tested(prediction, labels)["error"])
    total, epistemic = curves["total"], curves["epistemic"]
    return Outcome(
        metrics={
            "clean": total[0],
            "rise": total[-1] - total[0],
            "least_rise": min(after - before for before, after in pairwise(total)),
            "share": sum(epistemic) / sum(total),
        },
        details={"levels": LEVELS, **curves},
    )


def fewer_epochs(settings: Judged) -> Judged:
    """All images, so that a wider plain LeNet still gains, and few epochs."""
    reduced = small(settings)
    assert isinstance(reduced.fit, Fit)
    return replace(reduced, fit=replace(reduced.fit, num_images=IMAGES, epochs=5, kl_warmup=3.0), num_test=10_000)


def error_claim(text: str, better: str, than: str) -> Claim:
    """Which of two networks errs less."""
    return Claim(text=text, metric="error", better=better, than=than, data=(DATA,))


TABLES = (
    Table(
        name="implicit-figure-4",
        title="Fashion-MNIST, error of LeNets of growing width",
        paper="implicit BNN, Figure 4 (a picture, without numbers)",
        plus_minus="none",
        experiment=experiment(
            "implicit-widths",
            {
                (DATA, f"{name}-{width}"): Judged(fit=Fit(method=method, width=width))
                for width in WIDTHS
                for name, method in METHODS.items()
            },
            run_width,
            shared=False,
            smaller=fewer_epochs,
            words="5 epochs for 300, 1 noise sample for 2",
        ),
        metrics=(
            Metric(name="error", title="error (%)", lower_is_better=True),
            Metric(name="nll", title="NLL", lower_is_better=True),
        ),
        published={},
        claims=(
            error_claim("a plain network improves with width, 8 against 1", "plain-8", "plain-1"),
            error_claim("the implicit network improves with width, 8 against 1", "implicit-8", "implicit-1"),
            error_claim("mean field gets worse beyond 165k parameters, width 2", "mean-field-2", "mean-field-8"),
            error_claim("at width 8 the implicit network errs less", "implicit-8", "mean-field-8"),
        ),
        differs=DIFFERS,
    ),
    Table(
        name="implicit-figure-8",
        title="Fashion-MNIST, entropies under noise in the images",
        paper="implicit BNN, Figure 8 (a picture, without numbers)",
        plus_minus="none",
        experiment=experiment(
            "implicit-noise",
            {
                (noise, name): Judged(fit=Fit(method=method))
                for noise in NOISES
                for name, method in (("implicit", IMPLICIT), ("mc-dropout", explicit(MCDropout, rate=0.1)))
            },
            run_noise,
        ),
        metrics=(
            Metric(name="clean", title="entropy without noise", lower_is_better=True),
            Metric(name="rise", title="its rise to noise alone", lower_is_better=False),
            Metric(name="least_rise", title="least rise from level to level", lower_is_better=False),
            Metric(name="share", title="epistemic share over all levels", lower_is_better=False),
        ),
        published={},
        claims=(
            Claim(
                text="more of the implicit network's doubt is epistemic than of MC dropout's",
                metric="share",
                better="implicit",
                than="mc-dropout",
                data=tuple(NOISES),
            ),
        ),
        differs="Fashion-MNIST and a LeNet in place of CIFAR and a Wide ResNet-28-10; noise on values from 0 to 1; "
        + DIFFERS,
    ),
)
