"""Marginal likelihood, tuning and updates of Laplace posteriors against dense formulas and brute force."""

import copy
import math
import pickle

import pytest
import torch
from laplace_reference import categorical_hessian, cnn, gaussian_hessian, labels, layers, mlp, normal
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dubito import (
    EFB,
    GGN,
    INF,
    KFAC,
    Bernoulli,
    Categorical,
    ConfigError,
    DataError,
    Diagonal,
    DubitoWarning,
    Empirical,
    Fisher,
    Gaussian,
    Laplace,
)
from dubito.inference.laplace import tuning
from dubito.inference.laplace.posterior import SCALES

pytestmark = [
    pytest.mark.filterwarnings("ignore:the network is no better than a constant:dubito.DubitoWarning"),
    pytest.mark.filterwarnings("ignore:the validation rows speak against:dubito.DubitoWarning"),
]

STRUCTURES = [Diagonal(), KFAC(), EFB(), INF(rank=4), INF(rank=6, guard="clamp")]
every_structure = pytest.mark.parametrize("structure", STRUCTURES, ids=str)


def taught(network: nn.Module, inputs: Tensor, noise: float = 0.0, seed: int = 3) -> Tensor:
    """Targets that a slightly different network would give."""
    other = copy.deepcopy(network)
    with torch.no_grad():
        for number, parameter in enumerate(other.parameters()):
            parameter += 0.1 * normal(*parameter.shape, seed=number).to(parameter)
        outputs = other(inputs)
    return outputs + noise * normal(*outputs.shape, seed=seed)


def classified(network: nn.Module, inputs: Tensor) -> Tensor:
    return taught(network, inputs, noise=0.5).argmax(1)


def fitted(structure, network: nn.Module, inputs: Tensor, targets: Tensor, likelihood=None, **options):
    settings = {"curvature": GGN(), "prior_precision": 0.7, **options}
    return Laplace(structure=structure, **settings).fit(network, (inputs, targets), likelihood or Categorical())


# -- the marginal likelihood ----------------------------------------------------------------------------------------


def dense_evidence(posterior, log_likelihood: float, precisions: dict[str, float]) -> float:
    """log p(D|w*) + log N(w* | 0, 1/τ) − ½ log|P| + n/2 log 2π with P written out."""
    total = log_likelihood
    for name, precision in precisions.items():
        block = posterior.block(name)
        dense = block.precision_matrix
        dense = torch.block_diag(*dense) if dense.ndim == 3 else dense
        start = posterior.prior_precisions[name]
        dense = dense + (precision - start) * torch.eye(len(dense)).to(dense)
        weights = block.mean.flatten()
        prior = torch.distributions.Normal(torch.zeros(()).double(), precision**-0.5)
        total += float(prior.log_prob(weights).sum())
        total += -0.5 * float(torch.logdet(dense)) + 0.5 * len(weights) * math.log(2 * math.pi)
    return total


@every_structure
@pytest.mark.parametrize("make", [mlp, cnn])
def test_the_marginal_likelihood_is_that_of_the_dense_formula(structure, make) -> None:
    network = make()
    inputs = normal(30, 4) if make is mlp else normal(12, 2, 6, 5)
    targets = labels(len(inputs))
    posterior = fitted(structure, network, inputs, targets, batch_size=7)
    log_likelihood = -float(nn.functional.cross_entropy(network(inputs).detach(), targets, reduction="sum"))
    expected = dense_evidence(posterior, log_likelihood, posterior.prior_precisions)
    assert posterior.log_marginal_likelihood() == pytest.approx(expected, rel=1e-10)
    tempered = posterior._with(data_scale=7.0)  # it judges the model, not the tempering
    assert tempered.log_marginal_likelihood() == pytest.approx(expected, rel=1e-10)


COVARIANCE = ((1.0, 0.5), (0.5, 2.0))
LIKELIHOODS = [Bernoulli(), Gaussian(std=0.5), Gaussian(), Gaussian(covariance=COVARIANCE)]


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=str)
def test_the_likelihood_of_all_rows_is_part_of_it(likelihood) -> None:
    network, inputs = mlp(2), normal(30, 4)
    targets = labels(60, 2).reshape(30, 2) if isinstance(likelihood, Bernoulli) else normal(30, 2, seed=4)
    posterior = fitted(EFB(), network, inputs, targets, likelihood, batch_size=8)
    outputs = network(inputs).detach()
    if isinstance(likelihood, Bernoulli):
        truth = torch.distributions.Bernoulli(logits=outputs).log_prob(targets.double()).sum()
    elif likelihood.covariance is not None:
        covariance = torch.tensor(likelihood.covariance).double()
        truth = torch.distributions.MultivariateNormal(outputs, covariance).log_prob(targets).sum()
    else:
        std = torch.tensor(0.5).double() if likelihood.std else (targets - outputs).square().mean(0).sqrt()
        truth = torch.distributions.Normal(outputs, std).log_prob(targets).sum()
    assert posterior.log_likelihood == pytest.approx(float(truth), rel=1e-10)


def test_num_data_scales_the_likelihood_too() -> None:
    network, inputs, targets = mlp(), normal(30, 4), labels(30)
    method = Laplace(structure=Diagonal(), curvature=GGN(), prior_precision=0.7)
    one = method.fit(network, (inputs, targets), Categorical())
    ten = method.fit(network, (inputs, targets), Categorical(), num_data=300)
    twice = method.fit(network, (inputs.repeat(10, 1), targets.repeat(10)), Categorical())
    assert ten.log_likelihood == pytest.approx(10 * one.log_likelihood)
    assert ten.log_marginal_likelihood() == pytest.approx(twice.log_marginal_likelihood())


def test_linear_regression_has_the_exact_evidence() -> None:
    # For a linear model every layer has one output and INF at full rank is exact: the evidence is that of
    # y ~ N(X w, σ²) with w ~ N(0, 1/τ), whose weights are the posterior's mean.
    inputs, noise, precision = normal(25, 3), 0.4, 1.7
    targets = inputs @ torch.tensor([[1.0], [-2.0], [0.5]]).double() + noise * normal(25, 1, seed=2)
    gram = inputs.T @ inputs / noise**2 + precision * torch.eye(3).double()
    network = nn.Linear(3, 1, bias=False).double()
    with torch.no_grad():
        network.weight.copy_(torch.linalg.solve(gram, inputs.T @ targets / noise**2).T)
    marginal = noise**2 * torch.eye(25).double() + inputs @ inputs.T / precision
    truth = torch.distributions.MultivariateNormal(torch.zeros(25).double(), marginal).log_prob(targets[:, 0])
    for structure in (KFAC(), EFB(), INF(rank=1.0)):
        posterior = fitted(structure, network, inputs, targets, Gaussian(std=noise), prior_precision=precision)
        assert posterior.log_marginal_likelihood() == pytest.approx(float(truth), rel=1e-9)
        torch.testing.assert_close(posterior.block("weight").covariance_matrix, torch.linalg.inv(gram))


# -- the prior --------------------------------------------------------------------------------------------------------


@every_structure
@pytest.mark.parametrize("per_layer", [False, True])
def test_the_tuned_prior_is_that_of_a_fine_grid(structure, per_layer: bool) -> None:
    network, inputs = mlp(), normal(60, 4)
    posterior = fitted(structure, network, inputs, classified(network, inputs))
    tuned = posterior.tuned(per_layer=per_layer)
    assert tuned.data_scale == 60
    grid = torch.logspace(-3, 3, 2401).tolist()  # 0.6 % apart

    def best(names: list[str]) -> float:
        scores = []
        eigenvalues = [torch.linalg.eigvalsh(posterior.block(name).precision_matrix) - 0.7 for name in names]
        squares = sum(float(posterior.block(name).mean.square().sum()) for name in names)
        for precision in grid:
            spread = sum(float((values / precision).log1p().sum()) for values in eigenvalues)
            scores.append(-0.5 * (precision * squares + spread))
        return grid[scores.index(max(scores))]

    if per_layer:
        assert tuned.prior_precision == pytest.approx({name: best([name]) for name in posterior.blocks}, rel=0.01)
    else:
        assert tuned.prior_precision == pytest.approx(best(list(posterior.blocks)), rel=0.01)
    assert tuned.log_marginal_likelihood() > posterior.log_marginal_likelihood()
    again = tuned.tuned(per_layer=per_layer)
    assert again.prior_precision == pytest.approx(tuned.prior_precision, rel=1e-4)


def test_a_tuned_posterior_shares_memory_and_nothing_else() -> None:
    network, inputs = cnn(), normal(12, 2, 6, 5)
    posterior = fitted(INF(rank=4), network, inputs, labels(12))
    before = posterior.sample_outputs(inputs, 2)
    tuned = posterior.tuned(per_layer=True)
    assert type(tuned) is type(posterior) and tuned.method == posterior.method
    for (name, one), (_, two) in zip(posterior.state_dict().items(), tuned.state_dict().items(), strict=True):
        assert one.data_ptr() == two.data_ptr(), name
    assert torch.equal(posterior.sample_outputs(inputs, 2), before)
    assert not torch.equal(tuned.sample_outputs(inputs, 2), before)
    tuned.float()
    assert torch.equal(posterior.sample_outputs(inputs, 2), before)
    assert tuned.sample_outputs(inputs, 2).dtype == torch.float32
    assert not any(parameter.requires_grad for parameter in tuned.parameters())
    assert pickle.loads(pickle.dumps(posterior.details)) == posterior.details  # plain facts


def test_a_search_takes_few_steps() -> None:
    steps = []
    evidence = fitted(KFAC(), mlp(), normal(60, 4), labels(60)).evidence()
    plain = tuning.Evidence.num_determined

    def counting(self, precisions):
        steps.append(precisions)
        return plain(self, precisions)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning.Evidence, "num_determined", counting)
        evidence.best_precision(["0", "2"], 1.0)
        assert len(steps) <= 8
        evidence.best_precision(["0", "2"], 1e5)
        assert len(steps) <= 18


@pytest.mark.parametrize("slope", [1.0, 2.0, 0.01, 50.0])
@pytest.mark.parametrize("start", [-7.0, 0.3, 9.0])
def test_roots_of_falling_functions(slope: float, start: float) -> None:
    root = tuning.falling_root(
        lambda u: math.sinh(slope * (2.0 - u)) if abs(u) < 12 else 1e9 * (2 - u), start, -9.0, 9.0
    )
    assert root == pytest.approx(2.0, abs=2e-3)
    assert tuning.falling_root(lambda u: math.inf, start, -9.0, 9.0) == 9.0
    assert tuning.falling_root(lambda u: -math.inf, start, -9.0, 9.0) == -9.0
    assert tuning.falling_root(lambda u: 20 - u, start, -9.0, 9.0) == 9.0
    steep = tuning.falling_root(lambda u: math.inf if u < 1 else -1.0, start, -9.0, 9.0)
    assert steep == pytest.approx(1.0, abs=1e-4)


def test_weights_that_are_all_zero_have_no_best_prior() -> None:
    network, inputs = mlp(), normal(60, 4)
    with torch.no_grad():
        network[2].weight.zero_()
    posterior = fitted(Diagonal(), network, inputs, labels(60), prior_precision=None)
    with pytest.warns(DubitoWarning, match="no maximum in the prior precision of 0, 2, which stays at 1e-06") as caught:
        posterior.tuned(per_layer=True)  # nothing reaches layer 0 through a layer of zeros
    assert caught[0].filename == __file__
    with torch.no_grad():
        network[0].weight.zero_(), network[0].bias.zero_()
    assert fitted(Diagonal(), network, inputs, labels(60), prior_precision=None).prior_precision == 1.0


def test_the_default_prior_has_the_precision_of_the_weights() -> None:
    network, inputs = mlp(), normal(30, 4)
    posterior = fitted(KFAC(), network, inputs, labels(30), prior_precision=None, subset=["2"])
    assert posterior.prior_precision == pytest.approx(1 / float(network[2].weight.detach().square().mean()))
    assert posterior.method.prior_precision is None


# -- the noise --------------------------------------------------------------------------------------------------------


@every_structure
def test_tuned_noise_and_prior_are_those_of_a_grid(structure) -> None:
    network, inputs = mlp(1), normal(40, 4)
    targets = taught(network, inputs, noise=0.3)
    posterior = fitted(structure, network, inputs, targets, Gaussian())
    tuned = posterior.tuned(noise=True)
    rms = float((targets - network(inputs).detach()).square().mean().sqrt())
    assert float(posterior.likelihood.std()) == pytest.approx(rms)

    def evidence(std: float, precision: float) -> float:
        """Fitted anew with this noise: the curvature is that of GGN, ∝ 1/std²."""
        model = fitted(structure, network, inputs, targets, Gaussian(std=std), prior_precision=precision)
        return model.log_marginal_likelihood()

    best = tuned.log_marginal_likelihood()
    std, precision = float(tuned.likelihood.std()), tuned.prior_precision
    assert std > rms  # some of the residuals were fitted away
    assert best == pytest.approx(evidence(std, precision), rel=1e-9)
    for other in (0.5, 0.9, 0.97, 1.03, 1.1, 2.0):
        assert evidence(std * other, precision) < best
        assert evidence(std, precision * other) < best
        assert evidence(std * other, precision * other) < best
        assert evidence(std * other, precision / other) < best
    prediction = tuned.predict(inputs, 4)
    torch.testing.assert_close(prediction.aleatoric, torch.full((40, 1), std**2).double())


def test_noise_of_several_outputs_is_scaled_by_one_factor() -> None:
    network, inputs = mlp(2), normal(40, 4)
    targets = taught(network, inputs, noise=0.3) * torch.tensor([1.0, 5.0])
    posterior = fitted(EFB(), network, inputs, targets, Gaussian())
    tuned = posterior.tuned(noise=True, per_layer=True)
    factor = tuned.likelihood.std() / posterior.likelihood.std()
    assert float(factor[0]) == pytest.approx(float(factor[1])) and float(factor[0]) > 1
    assert float(factor[0]) ** 2 == pytest.approx(tuned.details["noise_factor"])
    assert tuned.tuned(noise=True, per_layer=True).details["noise_factor"] == pytest.approx(
        tuned.details["noise_factor"], rel=1e-3
    )


def test_only_learned_noise_of_the_models_own_curvature_can_be_tuned() -> None:
    network, inputs, targets = mlp(1), normal(40, 4), normal(40, 1, seed=3)
    for likelihood, options in ((Gaussian(std=0.3), {}), (Gaussian(), {"curvature": Empirical()})):
        posterior = fitted(Diagonal(), network, inputs, targets, likelihood, **options)
        with pytest.raises(ConfigError, match="noise=True scales the noise that Gaussian"):
            posterior.tuned(noise=True)
    with pytest.raises(ConfigError, match="noise=True scales"):
        fitted(Diagonal(), mlp(), inputs, labels(40)).tuned(noise=True)


# -- the data scale ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES[:4], ids=str)
@pytest.mark.parametrize("kind", ["classes", "reals"])
def test_validation_chooses_the_data_scale_of_the_likeliest_predictions(structure, kind: str) -> None:
    outputs = 3 if kind == "classes" else 2
    network, inputs, new = mlp(outputs), normal(30, 4), normal(50, 4, seed=7)
    if kind == "classes":
        likelihood, targets, expected = Categorical(), classified(network, inputs), classified(network, new)
    else:
        likelihood = Gaussian(std=0.2)
        targets, expected = (taught(network, rows, noise=0.2, seed=9) for rows in (inputs, new))
    posterior = fitted(structure, network, inputs, targets, likelihood)
    loader = DataLoader(TensorDataset(new, expected), batch_size=16)
    tuned = posterior.tuned(validation=loader)
    assert tuned.prior_precision == posterior.tuned().prior_precision
    nll = {}
    for scale in SCALES:
        one = posterior._with(prior_precision=tuned.prior_precision, data_scale=scale * 30)
        nll[scale * 30] = -float(one.predict(new, linearised=True).log_prob(expected).sum())
    assert tuned.data_scale == pytest.approx(min(nll, key=nll.__getitem__))
    assert tuned.log_marginal_likelihood() == pytest.approx(posterior.tuned().log_marginal_likelihood())
    assert posterior.tuned(validation=loader, scales=[0.5]).data_scale == 15


def test_validation_is_read_once() -> None:
    class Counting(TensorDataset):
        reads = 0

        def __getitem__(self, index):
            Counting.reads += 1
            return super().__getitem__(index)

    network, inputs = mlp(), normal(30, 4)
    posterior = fitted(INF(rank=4), network, inputs, labels(30))
    passes = []
    handle = posterior.network.register_forward_hook(lambda *_: passes.append(1))
    data = Counting(normal(40, 4), labels(40))
    one = copy.deepcopy(posterior)
    one.tuned(validation=data, scales=SCALES[:1])
    few, Counting.reads = len(passes), 0
    passes.clear()
    posterior.tuned(validation=data)
    handle.remove()
    assert Counting.reads == 40
    assert len(passes) == few > 0  # not more passes for more scales


def test_a_prior_that_predicts_worse_than_before_is_told() -> None:
    # A network that fits its data too well: its curvature is next to nothing, and the best prior very wide.
    network, inputs = mlp(2), normal(60, 4)
    targets = (network(inputs)[:, 0] > network(inputs)[:, 1]).long()
    with torch.no_grad():
        network[2].weight *= 40
    targets = 1 - targets
    posterior = fitted(KFAC(), network, inputs, targets, prior_precision=None)
    with pytest.warns(DubitoWarning, match="the validation rows speak against") as caught:
        tuned = posterior.tuned(validation=(inputs, targets), scales=[1.0])
    assert caught[0].filename == __file__
    own, new = (-float(one.predict(inputs, linearised=True).log_prob(targets).mean()) for one in (posterior, tuned))
    assert f"{new:.4g} a row at the best data scale, and {own:.4g} without tuning" in str(caught[0].message)
    kept = posterior.tuned(prior=False, validation=(inputs, targets), scales=[1.0, 1e6])
    assert kept.prior_precision == posterior.prior_precision


@every_structure
def test_noise_alone_keeps_the_prior(structure) -> None:
    network, inputs = mlp(1), normal(40, 4)
    posterior = fitted(structure, network, inputs, taught(network, inputs, noise=0.3), Gaussian())
    tuned = posterior.tuned(prior=False, noise=True)
    assert tuned.prior_precision == 0.7
    best, factor = tuned.log_marginal_likelihood(), tuned.details["noise_factor"]
    assert factor > 1
    for other in (0.9, 0.99, 1.01, 1.1):
        assert posterior._with(noise_factor=factor * other).log_marginal_likelihood() < best


def test_unusable_validation_is_refused() -> None:
    posterior = fitted(Diagonal(), mlp(), normal(30, 4), labels(30))
    with pytest.raises(DataError, match="the network cannot read inputs"):
        posterior.tuned(validation=(normal(5, 3), labels(5)))
    with pytest.raises(DataError, match=r"labels must lie in 0\.\.2"):
        posterior.tuned(validation=(normal(5, 4), torch.full((5,), 3)))
    with pytest.raises(ConfigError, match="leaves nothing to choose"):
        posterior.tuned(prior=False)
    with pytest.raises(ConfigError, match=r"scales\[1\] must be a finite number above 0"):
        posterior.tuned(validation=(normal(5, 4), labels(5)), scales=[1.0, 0.0])


# -- more data --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
@pytest.mark.parametrize("make", [mlp, cnn])
def test_an_update_averages_in_the_frozen_basis(structure, make) -> None:
    network = make()
    shape = (4,) if make is mlp else (2, 6, 5)
    old, new = normal(24, *shape), normal(12, *shape, seed=8)
    first = fitted(structure, network, old, labels(24))
    updated = first.update((new, labels(12)))
    whole = fitted(structure, network, torch.cat([old, new]), torch.cat([labels(24), labels(12)]))
    assert updated.num_data == updated.data_scale == 36
    assert updated.log_likelihood == pytest.approx(whole.log_likelihood)
    assert first.num_data == 24
    reference = layers(network, torch.cat([old, new]), categorical_hessian)
    for name, block in updated.blocks.items():
        kept = updated.block_tensors(block)
        if isinstance(structure, Diagonal | KFAC):  # exactly what a fit on all data gives
            expected = whole.block(name).precision_matrix
            torch.testing.assert_close(updated.block(name).precision_matrix, expected)
            continue
        for group in range(block.groups):
            left, right = kept["output_vectors"][group], kept["input_vectors"][group]
            assert torch.equal(left, first.block_tensors(block)["output_vectors"][group])
            basis = torch.kron(left.contiguous(), right.contiguous())
            exact = reference[name].information[group]
            along = (basis.mT @ exact @ basis).diagonal()
            torch.testing.assert_close(kept["eigenvalues"][group].flatten(), along)
            if isinstance(structure, INF):
                torch.testing.assert_close(kept["diagonal"][group].flatten(), exact.diagonal())
    if isinstance(structure, INF):
        assert updated.details["facts"]["0"]["rank"] == first.details["facts"]["0"]["rank"]


def test_an_update_of_a_tempered_and_noise_tuned_posterior() -> None:
    network, inputs, more = mlp(1), normal(40, 4), normal(20, 4, seed=5)
    targets, others = (taught(network, rows, noise=0.3) for rows in (inputs, more))
    posterior = fitted(Diagonal(), network, inputs, targets, Gaussian()).tuned(noise=True)
    tempered = posterior._with(data_scale=400.0)
    updated = tempered.update((more, others[:, 0]))
    assert updated.data_scale == pytest.approx(600)
    assert torch.equal(updated.likelihood.std(), posterior.likelihood.std())
    assert updated.prior_precision == posterior.prior_precision
    std = float(posterior.likelihood.std())
    outputs = network(torch.cat([inputs, more])).detach()
    truth = torch.distributions.Normal(outputs, std).log_prob(torch.cat([targets, others])).sum()
    assert updated.log_likelihood == pytest.approx(float(truth))
    exact = layers(network, torch.cat([inputs, more]), gaussian_hessian(std))
    for name in updated.blocks:
        expected = exact[name].precision(Diagonal(), 600, posterior.prior_precision)[0]
        torch.testing.assert_close(updated.block(name).precision_matrix, expected)
    updated.tuned(noise=True)


def test_labels_of_an_update_are_drawn_anew() -> None:
    # The same rows again: with the same labels nothing would change.
    network, inputs = mlp(), normal(30, 4)
    method = Laplace(structure=Diagonal(), prior_precision=0.7, curvature=Fisher())
    posterior = method.fit(network, (inputs, labels(30)), Categorical())
    one, two = (posterior.update((inputs, labels(30)), seed=seed) for seed in (0, 1))
    kept = [p.block_tensors(posterior.blocks["0"])["diagonal"] for p in (posterior, one, two)]
    assert not torch.allclose(kept[0], kept[1]) and not torch.allclose(kept[1], kept[2])
    again = posterior.update((inputs, labels(30)), seed=1)
    assert torch.equal(again.block_tensors(posterior.blocks["0"])["diagonal"], kept[2])
