"""What the k-tied paper's experiments on MNIST share: data, network, training and the three test metrics."""

from dataclasses import dataclass, replace

import torch

from dubito import Categorical, KTied, MeanField, metrics, seeds
from dubito.data import Part, load
from dubito.metrics import Over
from dubito.models import mlp
from dubito.training import KL, Training
from dubito.weight_normals import NormalPosterior

from ..runner import provenance
from ..runner.experiment import Cell, Metric, Published
from ..runner.trained import checkpoint as trained_at
from ..settings import explicit

DATA = "mnist-mlp"
HIDDEN = (400, 400)
#: To be raised when a change of the code changes what training gives; trained networks are then trained anew.
REVISION = 1


@dataclass(frozen=True, kw_only=True)
class Digits:
    """The images, with values from −1 to 1."""

    train: Part
    validation: Part
    test: Part


@dataclass(frozen=True, kw_only=True)
class Regime:
    """One training of the MLP 784-400-400-10 [appendix D.2, D.4].

    Args:
        rank: k, or None for mean field.
        epochs: passes over the 50,000 images.
        lr: learning rate of Adam, for means, standard deviations and factors alike.
        kl_slope: what each batch adds to the divergence's weight, which moves every 100 batches; None for the
            full weight from the first batch on.
        prior_std: σ_p.
        initial_std: where standard deviations start.
        initial_spread: standard deviation of their logarithms, which is about 0.001 / 0.01 for mean field.
        batch_size: images per step.
        num_samples: draws for the test metrics.
    """

    rank: int | None = None
    epochs: int = 300
    lr: float = 3e-3
    kl_slope: float | None = None
    prior_std: float = 0.2
    initial_std: float = 0.01
    initial_spread: float = 0.1
    batch_size: int = 1024
    num_samples: int = 100

    def method(self) -> MeanField | KTied:
        """Mean field or the k-tied Normal, without our halved rate for factors."""
        prior, std, spread = self.prior_std, self.initial_std, self.initial_spread
        if self.rank is None:
            return explicit(MeanField, prior_std=prior, initial_std=std, initial_spread=spread)
        return explicit(
            KTied, rank=self.rank, prior_std=prior, initial_std=std, initial_spread=spread, match_rates=False
        )

    def training(self, num_data: int, steps: int | None) -> Training:
        """The paper's training, ended after `steps` where given."""
        kl = explicit(KL)
        if self.kl_slope is not None:
            batches = -(-num_data // self.batch_size)
            kl = explicit(KL, warmup=1 / (self.kl_slope * batches), every=100)
        epochs = self.epochs if steps is None else None
        return explicit(Training, epochs=epochs, iterations=steps, batch_size=self.batch_size, lr=self.lr, kl=kl)


def load_cell(cell: Cell) -> Digits:
    """MNIST, the last 10,000 training images for validation."""
    data = load("mnist", standardise=False)
    assert data.validation is not None
    train, validation, test = (
        Part(2 * part.inputs - 1, part.targets) for part in (data.train, data.validation, data.test)
    )
    return Digits(train=train, validation=validation, test=test)


def generate_cell(cell: Cell) -> Digits:
    """Made-up images."""
    stream = seeds.generator(cell.seed, "made-up images")
    parts = [
        Part(2 * torch.rand(rows, 1, 28, 28, generator=stream) - 1, torch.randint(10, (rows,), generator=stream))
        for rows in (64, 16, 16)
    ]
    return Digits(train=parts[0], validation=parts[1], test=parts[2])


def trained(regime: Regime, digits: Digits, seed: int, steps: int | None) -> NormalPosterior:
    """A trained posterior; a whole run is kept in the user's cache, where other tables find it again."""
    checkpoint = trained_at(DATA, REVISION, regime, seed) if steps is None else None
    posterior = provenance.fit(
        regime.method(),
        mlp(784, HIDDEN, seed=seed),
        digits.train,
        explicit(Categorical),
        training=regime.training(len(digits.train.targets), steps),
        checkpoint=checkpoint,
        seed=seed,
        progress=False,
    )
    assert isinstance(posterior, NormalPosterior)
    return posterior


@torch.no_grad()
def tested(
    posterior: NormalPosterior, part: Part, num_data: int, num_samples: int, seed: int
) -> tuple[dict[str, float], dict[str, float]]:
    """−ELBO per example, and nll and accuracy of the mean over draws; then their standard errors over examples.

    Args:
        posterior: whose.
        part: the images to test on.
        num_data: training images, over which the divergence is shared out.
        num_samples: draws.
        seed: of the draws.
    """
    inputs, targets = part
    log_probs = posterior.sample_outputs(inputs, num_samples, seed=seed).log_softmax(-1)  # [S, B, C]
    expected = -log_probs[:, torch.arange(len(targets)), targets].double().mean(0)
    probs = log_probs.double().exp().mean(0)
    nll = metrics.nll_per_example(probs, targets)
    correct = metrics.correct_per_example(probs, targets).double()
    each = {"nll": nll, "accuracy": 100 * correct, "expected_nll": expected}
    means = {name: float(values.mean()) for name, values in each.items()}
    # −ELBO / N = KL / N + E_q[−log p(y | x, w)], on test images  [Eq. 2]
    divergence = float(posterior.kl()) / num_data
    found = {"neg_elbo": divergence + means["expected_nll"], "nll": means["nll"], "accuracy": means["accuracy"]}
    errors = {name: float(values.std() / len(values) ** 0.5) for name, values in each.items()}
    return found, {"kl_per_image": divergence, **{f"{name}_se": error for name, error in errors.items()}}


METRICS = (
    Metric(name="neg_elbo", title="−ELBO", lower_is_better=True),
    Metric(name="nll", title="NLL", lower_is_better=True),
    Metric(name="accuracy", title="accuracy, %", lower_is_better=False),
)
METHODS = ("mean-field", "1-tied", "2-tied", "3-tied")
RANKS = dict(zip(METHODS, (None, 1, 2, 3), strict=True))
PLUS_MINUS = (
    "standard error over test examples, as the binomial of its accuracies shows, though the paper says over 100 draws"
)


def published(printed: str, names: tuple[str, ...]) -> dict[tuple[str, str, str], Published]:
    """The paper's numbers by data, method and metric: rows `data method value±error …`, errors over examples."""
    numbers = {}
    for data, method, *entries in map(str.split, printed.strip().splitlines()):
        for name, entry in zip(names, entries, strict=True):
            value, _, error = entry.partition("±")
            exact = Published(float(value))
            numbers[data, method, name] = replace(exact, error=float(error), over=Over.EXAMPLES) if error else exact
    return numbers
