"""Passes in half precision: the network's products alone, and everything that is summed in full."""

import copy

import pytest
import torch
from torch import Tensor, nn

from dubito import (
    BALI,
    EFB,
    GGN,
    INF,
    KFAC,
    SWAG,
    Categorical,
    ConfigError,
    DeepEnsemble,
    KTied,
    Laplace,
    MCDropout,
    MeanField,
    Rank1,
    Training,
    last_layer,
)
from dubito.distributions.two_sided import TwoSided
from dubito.inputs import TensorOptions
from dubito.method import Method
from dubito.posterior import Posterior
from dubito.precision import half_passes, passes_in

pytestmark = pytest.mark.filterwarnings("ignore:the network is no better than a constant:dubito.DubitoWarning")

METHODS: dict[str, Method] = {
    "mean field": MeanField(),
    "2-tied": KTied(),
    "rank1": Rank1(components=2),
    "dropout": MCDropout(rate=0.1),
    "ensemble": DeepEnsemble(members=2),
    "swag": SWAG(),
    "bali": BALI(effective_data=50.0),
    "kfac": Laplace(structure=KFAC(), prior_precision=10.0),
    "linearised": Laplace(structure=EFB(), prior_precision=10.0, linearised=True),
    "linearised inf": Laplace(structure=INF(rank=4), prior_precision=10.0, linearised=True),
}


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def network(outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, outputs))


def rows(count: int = 60) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(1))
    return x, x[:, :3].argmax(1)


def fitted(method: Method) -> Posterior:
    training = None if isinstance(method, Laplace) else Training(iterations=4, batch_size=20)
    return method.fit(network(), rows(), Categorical(), training=training)


@pytest.mark.parametrize("count", [2, 60])
@pytest.mark.parametrize("name", METHODS)
def test_predictions_in_bf16_are_those_in_full_precision_to_its_rounding(name: str, count: int):
    posterior, (x, y) = fitted(METHODS[name]), rows(count)
    full, half = (posterior.predict(x, 8, precision=precision) for precision in ("full", "bf16"))
    # bf16 rounds by 2⁻⁹ of a number, three layers and some sums of them make up to 2 % of logits of size 1.
    difference = (full.log_probs - half.log_probs).abs().max()
    assert 1e-5 < difference < 0.05
    assert half.log_probs.dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu") and half_passes() is None
    metrics = posterior.evaluate((x, y), num_samples=8, precision="bf16")
    assert metrics["nll"] == pytest.approx(float(-half.log_prob(y).mean()), rel=1e-5)


@pytest.mark.parametrize("subset", [None, last_layer])
def test_the_order_of_precisions_changes_nothing(subset):
    """What was found of passes in one precision is not taken for those in another."""
    x = rows(5)[0]
    for method in (Laplace(subset=subset), Rank1(components=2)):
        first = fitted(method)
        orders = (first, ("full", "bf16", "fp16")), (copy.deepcopy(first), ("fp16", "bf16", "full"))
        answers = [
            {precision: posterior.predict(x, 8, precision=precision).log_probs for precision in order}
            for posterior, order in orders
        ]
        for precision, log_probs in answers[0].items():
            assert torch.equal(log_probs, answers[1][precision])


def test_a_prediction_in_bf16_is_the_mean_over_passes_under_autocast():
    posterior, (x, _) = fitted(MeanField()), rows(5)
    outputs = []
    for index in range(4):
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            outputs.append(posterior.fold(index)(x))
    assert outputs[0].dtype == torch.bfloat16
    probs = torch.stack(outputs).double().softmax(-1).mean(0)
    torch.testing.assert_close(posterior.predict(x, 4, precision="bf16").probs.double(), probs, rtol=0, atol=1e-6)


def test_fp16_is_finer_than_bf16():
    posterior, (x, _) = fitted(MeanField()), rows()
    full = posterior.predict(x, 8).log_probs
    errors = {
        precision: (posterior.predict(x, 8, precision=precision).log_probs - full).abs().max()  # pyright: ignore
        for precision in ("bf16", "fp16")
    }
    assert 0 < errors["fp16"] < errors["bf16"] / 3  # 10 bits behind the point, and not 7


def test_what_is_not_the_network_runs_in_full_precision(monkeypatch: pytest.MonkeyPatch):
    posterior, (x, _) = fitted(METHODS["kfac"]), rows(2)
    turned = TwoSided.turned

    def watched(self: TwoSided, x: Tensor) -> Tensor:
        assert not torch.is_autocast_enabled("cpu") and x.dtype == torch.float32
        return turned(self, x)

    monkeypatch.setattr(TwoSided, "turned", watched)
    judged = []
    predictive = posterior.likelihood.predictive

    def judge(draws):
        outputs = list(draws)
        judged.extend(outputs)
        assert not torch.is_autocast_enabled("cpu")
        return predictive(outputs)

    monkeypatch.setattr(posterior.likelihood, "predictive", judge)
    posterior.predict(x, 4, precision="bf16", linearised=False)
    assert len(judged) == 4 and all(outputs.dtype == torch.float32 for outputs in judged)


def test_an_error_in_a_pass_leaves_full_precision_behind():
    posterior = fitted(MeanField())
    with pytest.raises(Exception, match="cannot read"):
        posterior.predict(torch.zeros(2, 5), precision="bf16")
    assert half_passes() is None and not torch.is_autocast_enabled("cpu")


def test_other_precisions_are_refused():
    posterior, (x, y) = fitted(MeanField()), rows()
    for call in (
        lambda: posterior.predict(x, precision="half"),  # pyright: ignore
        lambda: posterior.evaluate((x, y), precision="half"),  # pyright: ignore
        lambda: posterior.predict_batches(x, precision="half"),  # pyright: ignore
        lambda: Laplace(precision="half"),  # pyright: ignore
    ):
        with pytest.raises(ConfigError, match=r"unknown precision 'half'\. Known: bf16, fp16, full"):
            call()


# -- Laplace -------------------------------------------------------------------------------------------------


def inputs_of_layers(net: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """What every layer reads under autocast, with a column of ones, in float64."""
    inputs: dict[str, Tensor] = {}
    for name, module in net.named_children():
        if isinstance(module, nn.Linear):
            inputs[name] = torch.cat([x.double(), torch.ones(len(x), 1, dtype=torch.float64)], 1)
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            x = module(x)
    return inputs


def test_sums_of_half_precision_passes_are_in_full_precision():
    net, (x, y) = network(), rows(3000)
    method = Laplace(structure=KFAC(), curvature=GGN(), precision="bf16", batch_size=500)
    posterior = method.fit(net, (x, y), Categorical())
    for name, a in inputs_of_layers(net, x).items():
        stored = posterior.block_tensors(posterior.blocks[name])  # pyright: ignore
        vectors, values = stored["input_vectors"][0].double(), stored["input_eigenvalues"][0].double()
        truth = a.mT @ a / len(a)
        # Single precision: sums of 3,000 terms in bf16 would be wrong in the second digit.
        torch.testing.assert_close((vectors * values) @ vectors.mT, truth, rtol=1e-4, atol=2e-6 * float(truth.max()))
        assert stored["input_vectors"].dtype == torch.float32


@pytest.mark.parametrize("structure", [KFAC(), EFB(), INF(rank=4)], ids=lambda structure: structure.title)
def test_a_fit_in_bf16_is_that_in_full_precision_to_its_rounding(structure):
    net, data = network(), rows(200)
    full, half = (
        Laplace(structure=structure, curvature=GGN(), precision=precision, prior_precision=1.0).fit(
            net, data, Categorical()
        )
        for precision in ("full", "bf16")
    )
    for name in full.blocks:  # pyright: ignore
        variance, other = (posterior.block(name).variance for posterior in (full, half))  # pyright: ignore
        # Squares of numbers that are right to 2⁻⁸, over rows.
        torch.testing.assert_close(other, variance, rtol=0.03, atol=0)
        assert not other.equal(variance)
    more = rows(50)
    updated = half.update(more)  # pyright: ignore
    assert updated.num_data == 250


def test_passes_in_full_precision_within_half():
    options = TensorOptions(torch.float32, torch.device("cpu"))
    with passes_in("bf16", *options):
        assert half_passes() is not None
        with passes_in("full", *options):
            assert half_passes() is None
        assert half_passes() is not None
