"""The implicit paper's Tables 3 to 7 on CIFAR-10: its main result, the number of components, settings, pretraining."""

from collections.abc import Mapping
from dataclasses import replace

from dubito import MAP, DeepEnsemble, Implicit, MCDropout
from dubito.method import Method
from dubito.training import Constant, Linear

from ..cifar.cells import CLEAN, DIFFERS, MEAN_FIELD, METRICS, NORMAL_KERNELS, Judged, experiment, lower
from ..cifar.fits import DATA, Fit
from ..runner.experiment import Published, Table
from ..settings import explicit

#: Components of Tables 3 to 6.
COMPONENTS = (4, 8, 16, 24, 32)
#: λ₁, s and σ₀ of Table 2 for the VGG-16 on CIFAR-10.
LATENT_LR, PRIOR_STD, MEAN_STD = 1.2, 0.3, 0.75
#: Where a few epochs start means from: at σ₀ = 0.75 the VGG underfits (validation accuracy after 3 epochs of 10,000
#: images 38 %, at 0.25 49 %, the plain network's 54 %).
START = 0.25
#: Of whole channels; at 0.1 the validation accuracy of such a brief run is 42 %, at 0.02 50 %.
DROPOUT = 0.02
#: Draws of each component at test time, for the paper's 5.
PER_COMPONENT, PAPERS_DRAWS = 2, 5


def implicit(components: int = 4, **changes: object) -> Implicit:
    """The implicit network with Table 2's prior."""
    settings = {"components": components, "prior_std": PRIOR_STD, "mean_std": START, **changes}
    return explicit(Implicit, **settings)


def small(method: Method, num_samples: int = 8, **changes: object) -> Judged:
    """What two CPU cores do."""
    latent = {"variational_lr": LATENT_LR, "variational_schedule": explicit(Constant)}
    fit = Fit(method=method, network="vgg", lr=0.1, **(latent if isinstance(method, Implicit) else {}))
    return Judged(fit=replace(fit, **changes), num_samples=num_samples)


PLAIN = small(explicit(MAP), 1)
#: That of rank-1's table: at a tenth of it standard deviations would stay where they start.
STD_LR = 10.0
#: The seed's own plain run and further ones, which stand beside the components in Figure 2 too.
ENSEMBLE = explicit(DeepEnsemble, members=4)
SMALL: Mapping[str, Judged] = {
    "sgd": PLAIN,
    "mc-dropout": small(explicit(MCDropout, rate=DROPOUT)),
    "mean-field": small(MEAN_FIELD, **NORMAL_KERNELS, variational_lr=STD_LR),
    "deep-ensemble": small(ENSEMBLE, ENSEMBLE.members),
    **{f"implicit-{count}": small(implicit(count), PER_COMPONENT * count) for count in COMPONENTS},
}


def full(method: Method, num_samples: int = 16, **changes: object) -> Judged:
    """The authors' VGG-16 and run."""
    fit = Fit(
        method=method, network="vgg16", size=32, epochs=300, num_images=50_000, lr=0.05, kl_warmup=200.0,
        schedule=explicit(Linear, start=0.5, end=0.9, final=0.01),
    )  # fmt: skip
    if isinstance(method, Implicit):
        fit = replace(fit, variational_lr=LATENT_LR, variational_schedule=explicit(Constant))
    return Judged(fit=replace(fit, **changes), num_samples=num_samples)


PAPER: Mapping[str, Judged] = {
    "sgd": full(explicit(MAP), 1),
    "deep-ensemble": full(ENSEMBLE, ENSEMBLE.members),
    "mc-dropout": full(explicit(MCDropout, rate=0.1)),
    "mean-field": full(MEAN_FIELD, **NORMAL_KERNELS),
    **{
        f"implicit-{count}": full(implicit(count, noise_samples=2, mean_std=MEAN_STD), PAPERS_DRAWS * count)
        for count in COMPONENTS
    },
}
#: Tables 3 to 5, VGG-16 on CIFAR-10: accuracy in percent (100 less the error), NLL, ECE.
PRINTED = """
sgd          93.28  0.3255  0.0476
mc-dropout   93.29  0.2887  0.0421
mean-field   90.37  0.6601  0.0656
implicit-4   93.67  0.2147  0.0173
implicit-8   93.69  0.2061  0.0163
implicit-16  93.81  0.1983  0.0149
"""


def published() -> dict[tuple[str, str, str], Published]:
    """The paper's numbers by data, method and metric."""
    return {
        (DATA, name, metric): Published(float(value))
        for name, *values in map(str.split, PRINTED.strip().splitlines())
        for metric, value in zip(("accuracy", "nll", "ece"), values, strict=True)
    }


#: Table 7's mechanism: the stored plain network, then factors at a rate of their own beside weights that hardly move.
TUNED = {"start": PLAIN.fit, "epochs": 3, "kl_warmup": 1.0, "lr": 1e-3, "variational_lr": 0.2}
SETTINGS: Mapping[str, Judged] = {
    "sgd": PLAIN,
    "implicit-4": small(implicit()),
    "s-0.1": small(implicit(prior_std=0.1)),
    "s-1": small(implicit(prior_std=1.0)),
    "sigma0-0.5": small(implicit(mean_std=0.5)),
    "sigma0-0.75": small(implicit(mean_std=MEAN_STD)),
    "lambda1-0.1": small(implicit(), variational_lr=0.1),
    "lambda1-4.8": small(implicit(), variational_lr=4.8),
    "pretrained-4": small(implicit(prior_std=0.1, mean_std=0.1), **TUNED),
    "pretrained-8": small(implicit(8, prior_std=0.1, mean_std=0.1), PER_COMPONENT * 8, **TUNED),
    "plain-longer": small(explicit(MAP), 1, **(TUNED | {"variational_lr": None})),
}
#: Nothing is claimed of corrupted images.
EFFECTS = {name: replace(judged, shifted=False) for name, judged in SETTINGS.items()}
SMALLER = (
    "45,000 images of 16×16 (pooled from 32×32) for 50,000 of 32×32, a VGG of 5 convolutions (24 to 96 channels) for "
    "13 (64 to 512), 6 epochs for 300, one draw of noise per image and step for 2, 3 seeds for 5"
)
OURS = (
    "batch norm after every convolution, without which a few epochs do not suffice; weights fall from 0.1 along a "
    "cosine for a straight fall from 0.05; means start at N(1, 0.25²) for 0.75²; each component sees B/K of a batch's "
    "rows, as in Algorithm 1; 2 draws of each component at test time; mean field by Flipout, with Normal kernels "
    "under N(0, 0.1²) and without weight decay; an ensemble of 4 is ours; the KL's weight is 1 after 4 of 6 epochs for "
    "200 of 300; MC dropout drops whole "
    "channels, at a rate of 0.02 (of 0.02 and 0.1 the better on validation images); settings not in Table 2 were "
    f"chosen on 5,000 training images; {DIFFERS}"
)

TABLES = (
    Table(
        name="implicit-cifar10",
        title="CIFAR-10, a VGG with factors on its nodes beside other posteriors",
        paper="implicit BNN, Tables 3 to 6, Figures 5 to 7",
        plus_minus="standard deviations over 5 runs, left out",
        experiment=experiment("implicit", "implicit-cifar10", SMALL, PAPER, SMALLER),
        metrics=METRICS,
        published=published(),
        claims=(
            lower("the implicit network has a lower NLL than the plain one", "implicit-4", "sgd"),
            lower("and is right more often", "implicit-4", "sgd", "accuracy"),
            lower("and better calibrated", "implicit-4", "sgd", "ece"),
            lower("it has a lower NLL than MC dropout", "implicit-4", "mc-dropout"),
            lower("it has a lower NLL than mean field", "implicit-4", "mean-field"),
            lower("16 components have a lower NLL than 4", "implicit-16", "implicit-4"),
            lower("32 components have a higher NLL than 16", "implicit-16", "implicit-32"),
        ),
        differs=f"Table 6 is of CIFAR-100; {OURS}",
    ),
    Table(
        name="implicit-cifar10-effects",
        title="CIFAR-10, what s, σ₀ and λ₁ do, and factors on a trained network",
        paper="implicit BNN, Section 3.3 and Table 7 (ImageNet, ResNet-50)",
        plus_minus="none",
        experiment=experiment(
            "implicit", "implicit-cifar10-effects", EFFECTS, {"implicit-4": PAPER["implicit-4"]}, SMALLER
        ),
        metrics=CLEAN,
        published={},
        claims=(
            lower("a high λ₁ is crucial: 1.2 against 0.1", "implicit-4", "lambda1-0.1"),
            lower("so is s: 0.3 against 1", "implicit-4", "s-1"),
            lower("factors on a trained network lower its NLL", "pretrained-4", "sgd"),
            lower("by more than as many epochs of plain training", "pretrained-4", "plain-longer"),
        ),
        differs="the paper gives no numbers for s, σ₀ and λ₁, and Table 7 for ImageNet; pretrained networks are the "
        "stored plain ones, then 3 epochs at rates 1e-3 and 0.2 (the paper 15 at 1e-4 and 0.2), prior and start "
        f"N(1, 0.1²); {OURS}",
    ),
)
