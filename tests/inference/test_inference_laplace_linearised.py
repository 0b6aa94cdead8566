"""Linearised predictions against J P⁻¹ Jᵀ with Jacobians by torch.func and dense covariances."""

import copy
import math

import pytest
import torch
from laplace_reference import cnn, dense_covariance, jacobian, labels, mlp, normal
from torch import Tensor, nn

import dubito
from dubito import (
    EFB,
    INF,
    KFAC,
    Bernoulli,
    Categorical,
    Diagonal,
    Gaussian,
    HeteroscedasticGaussian,
    Laplace,
    NetworkError,
    load,
)
from dubito.inference.laplace import covariance, linearised, shares
from dubito.inputs import map_tensors
from dubito.layers import survey

pytestmark = pytest.mark.filterwarnings("ignore:the network is no better than a constant:dubito.DubitoWarning")

STRUCTURES = [Diagonal(), KFAC(), EFB(), INF(rank=5), INF(rank=5, guard="clamp")]
every_structure = pytest.mark.parametrize("structure", STRUCTURES, ids=str)
one_of_each = pytest.mark.parametrize("structure", STRUCTURES[:4], ids=str)


def covariances(posterior, inputs) -> Tensor:
    """J P⁻¹ Jᵀ [B, E, E], everything dense."""
    return dense_covariance(posterior, inputs).diagonal(dim1=0, dim2=2).movedim(2, 0)


def output_covariances(posterior, inputs, max_rows: int = 5) -> tuple[Tensor, Tensor]:
    read = posterior.linearised(inputs)
    outputs, (covariance,) = read(inputs, [posterior.normals], max_rows, pairs=True)
    return outputs, covariance


# -- covariances of outputs -----------------------------------------------------------------------------------------


@every_structure
@pytest.mark.parametrize("make", [mlp, cnn])
def test_covariances_are_those_of_dense_jacobians(structure, make) -> None:
    network = make()
    shape = (4,) if make is mlp else (2, 6, 5)
    inputs, new = normal(30, *shape), normal(11, *shape, seed=5)
    posterior = Laplace(structure=structure).fit(network, (inputs, labels(30)), Categorical())
    outputs, covariance = output_covariances(posterior, new)
    expected, jacobians = jacobian(network, new)  # a second way to the Jacobians, row by row
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(covariance, covariances(posterior, new), rtol=1e-9, atol=1e-12)
    if isinstance(structure, Diagonal):
        simple = torch.zeros(11, 3, 3).double()
        for block in posterior.blocks.values():
            variance = block.tensors(posterior.block(block.name).variance.reshape(block.groups, block.rows, -1))
            for name, own in variance.items():
                flat = jacobians[name].flatten(2)
                simple += (flat * own.flatten()) @ flat.mT
        torch.testing.assert_close(covariance, simple)


class Everything(nn.Module):
    """An embedding, a recurrent layer, attention, norms, a transposed convolution, a shared layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(7, 4), nn.LSTM(4, 4, batch_first=True)
        self.attention, self.norm = nn.MultiheadAttention(4, 2, batch_first=True), nn.LayerNorm(4)
        self.shared, self.up = nn.Linear(4, 4), nn.ConvTranspose1d(4, 3, 2)
        self.batch_norm, self.head = nn.BatchNorm1d(3), nn.Linear(3, 2)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.lstm(self.embedding(ids))[0]
        hidden = self.norm(hidden + self.attention(hidden, hidden, hidden)[0])
        hidden = torch.tanh(self.shared(torch.tanh(self.shared(hidden))))
        return self.head(self.batch_norm(self.up(hidden.mT)).mean(2))


@one_of_each
def test_layers_of_every_kind(structure) -> None:
    network = Everything().double()
    ids = torch.randint(7, (12, 3), generator=torch.Generator().manual_seed(0))
    posterior = Laplace(structure=structure).fit(network, (ids, labels(12, 2)), Categorical())
    assert {name for block in posterior.blocks.values() for name in block.parameters} == set(posterior.weights())
    torch.testing.assert_close(
        output_covariances(posterior, ids)[1], covariances(posterior, ids), rtol=1e-9, atol=1e-12
    )


class Heads(nn.Module):
    """Outputs that do not all depend on every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(4, 5), nn.Linear(5, 1), nn.Linear(5, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(inputs))
        return torch.cat([self.left(hidden), self.right(hidden)], 1)


@one_of_each
def test_outputs_that_do_not_depend_on_every_layer(structure) -> None:
    inputs = normal(12, 4)
    posterior = Laplace(structure=structure).fit(Heads().double(), (inputs, labels(12)), Categorical())
    torch.testing.assert_close(output_covariances(posterior, inputs)[1], covariances(posterior, inputs))


@one_of_each
@pytest.mark.parametrize("budget", [1, 1 << 12])
def test_chunks_change_nothing(structure, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = normal(40, 2, 6, 5)
    posterior = Laplace(structure=structure).fit(cnn(), (inputs, labels(40)), Categorical())
    expected = output_covariances(posterior, inputs, 1000)[1]
    monkeypatch.setattr(linearised, "BUDGET", budget)
    monkeypatch.setattr(covariance, "CHUNK", budget)
    monkeypatch.setattr(shares, "CHUNK", budget)
    torch.testing.assert_close(output_covariances(posterior, inputs)[1], expected)
    torch.testing.assert_close(output_covariances(posterior, inputs[:1])[1], expected[:1])


def test_draws_of_outputs_do_not_depend_on_the_rows_beside() -> None:
    """Covariances whose eigenvalues are alike: their eigenvectors may turn from one batch to the next."""
    inputs = normal(30, 4)
    posterior = Laplace(subset=dubito.last_layer, prior_precision=1.0).fit(
        mlp(4), (inputs, 0.3 * normal(30, 2, seed=1)), HeteroscedasticGaussian()
    )
    whole, parts = posterior.predict(inputs, 6), posterior.predict(inputs, 6, max_rows=7)
    torch.testing.assert_close(parts.aleatoric_std, whole.aleatoric_std, rtol=1e-5, atol=1e-6)
    moved = posterior.predict(inputs + 1e-6, 6)
    torch.testing.assert_close(moved.aleatoric_std, whole.aleatoric_std, rtol=1e-3, atol=0)


@pytest.mark.parametrize("outputs", [1, 3])
def test_roots_of_covariances(outputs: int) -> None:
    factor = normal(5, outputs, outputs).double()
    covariance = factor @ factor.mT
    covariance[0, 0] = covariance[0, :, 0] = 0  # an output that no weight moves
    root = linearised.covariance_root(covariance)
    torch.testing.assert_close(root @ root.mT, covariance)
    torch.testing.assert_close(root, root.mT)


@one_of_each
def test_float32_agrees_with_float64(structure) -> None:
    network, inputs = cnn(), normal(30, 2, 6, 5)
    posterior = Laplace(structure=structure).fit(network, (inputs, labels(30)), Categorical())
    expected = output_covariances(posterior, inputs)[1]
    found = output_covariances(posterior.float(), inputs.float())[1]
    assert found.dtype == torch.float32
    assert (found.double() - expected).norm() / expected.norm() < 1e-4


@pytest.mark.parametrize("positions", [1, 3])
def test_small_differences_are_taken_in_float64(positions: int) -> None:
    # Weights that the data determine well: J P⁻¹ Jᵀ is the difference of two numbers ten thousand times as large.
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 1, bias=False)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.linear(inputs).mean(1)

    inputs = normal(50, positions, 3).float()
    targets = inputs.sum((1, 2))[:, None]
    network = Mean()
    posterior = Laplace(structure=INF(rank=1.0), prior_precision=0.1).fit(network, (inputs, targets), Gaussian(std=0.2))
    _, covariance = output_covariances(posterior, inputs)
    normals = posterior.normals("linear")
    precise = normals[0].precision_matrix.double()
    means = inputs.double().mean(1)
    expected = torch.einsum("bi,ij,bj->b", means, torch.linalg.inv(precise), means)
    assert (expected < 1e-3 * means.square().sum(1) / 0.1).all()  # cancelled nearly all
    torch.testing.assert_close(covariance[:, 0, 0].double(), expected, rtol=2e-3, atol=0)


# -- predictions ----------------------------------------------------------------------------------------------------


@one_of_each
def test_classes_come_from_the_probit_approximation(structure) -> None:
    network, inputs = mlp(), normal(30, 4)
    posterior = Laplace(structure=structure).fit(network, (inputs, labels(30)), Categorical())
    prediction = posterior.predict(inputs, linearised=True)
    outputs = network(inputs).detach()
    variance = covariances(posterior, inputs).diagonal(dim1=1, dim2=2)
    probs = (outputs / (1 + math.pi * variance / 8).sqrt()).softmax(-1)
    torch.testing.assert_close(prediction.probs, probs)
    entropy = torch.distributions.Categorical(probs=probs).entropy()
    own = torch.distributions.Categorical(logits=outputs).entropy()
    torch.testing.assert_close(prediction.total, entropy)
    torch.testing.assert_close(prediction.aleatoric, torch.minimum(own, entropy))
    torch.testing.assert_close(prediction.epistemic, (entropy - own).clamp(min=0), atol=1e-12, rtol=0)
    targets = labels(30)
    expected = probs.log()[torch.arange(30), targets]
    torch.testing.assert_close(prediction.log_prob(targets), expected)
    assert prediction[3:5].probs.shape == (2, 3)
    metrics = posterior.evaluate((inputs, targets), linearised=True)
    assert metrics["nll"] == pytest.approx(-float(expected.mean()))
    assert posterior.evaluate((inputs, targets), linearised=True, max_rows=7) == pytest.approx(metrics)


def test_class_axes_and_positions() -> None:
    inputs = normal(12, 2, 3, 3)
    network = nn.Conv2d(2, 4, 2).double()
    targets = labels(12 * 4, 4).reshape(12, 2, 2)
    posterior = Laplace(structure=KFAC()).fit(network, (inputs, targets), Categorical())
    prediction = posterior.predict(inputs, linearised=True)
    variance = covariances(posterior, inputs).diagonal(dim1=1, dim2=2).reshape(12, 4, 2, 2)
    probs = (network(inputs).detach() / (1 + math.pi * variance / 8).sqrt()).softmax(1)
    torch.testing.assert_close(prediction.probs, probs)
    expected = probs.log().gather(1, targets[:, None]).sum((1, 2, 3))
    torch.testing.assert_close(prediction.log_prob(targets), expected)


@pytest.mark.parametrize("outputs", [1, 2])
def test_yes_or_no_comes_from_the_probit_approximation(outputs: int) -> None:
    network, inputs = mlp(outputs), normal(30, 4)
    targets = labels(30 * outputs, 2).reshape(30, outputs)
    posterior = Laplace(structure=EFB()).fit(network, (inputs, targets), Bernoulli())
    prediction = posterior.predict(inputs, linearised=True)
    logits = network(inputs).detach()
    variance = covariances(posterior, inputs).diagonal(dim1=1, dim2=2)
    truth = torch.distributions.Bernoulli(logits=logits / (1 + math.pi * variance / 8).sqrt())
    torch.testing.assert_close(prediction.probs, truth.probs)
    torch.testing.assert_close(prediction.log_prob(targets), truth.log_prob(targets.double()).sum(1))
    torch.testing.assert_close(prediction.total, truth.entropy())
    torch.testing.assert_close(prediction.epistemic + prediction.aleatoric, prediction.total)
    # The approximation itself is good: against the integral over the logits, by quadrature.
    grid = torch.linspace(-8, 8, 4001).double()
    weights = torch.distributions.Normal(0.0, 1.0).log_prob(grid).exp()
    integral = (torch.sigmoid(logits[..., None] + variance.sqrt()[..., None] * grid) * weights).sum(-1) / weights.sum()
    assert (prediction.probs - integral).abs().max() < 0.025


REALS = [Gaussian(std=0.3), Gaussian(std=(0.3, 2.0)), Gaussian(), Gaussian(covariance=((1.0, 0.5), (0.5, 2.0)))]


@pytest.mark.parametrize("likelihood", REALS, ids=str)
@pytest.mark.parametrize("structure", [Diagonal(), INF(rank=5)], ids=str)
def test_reals_are_normal(structure, likelihood) -> None:
    network, inputs, targets = mlp(2), normal(30, 4), normal(30, 2, seed=3)
    posterior = Laplace(structure=structure).fit(network, (inputs, targets), likelihood)
    prediction = posterior.predict(inputs, linearised=True)
    outputs, covariance = network(inputs).detach(), covariances(posterior, inputs)
    if likelihood.covariance is not None:
        noise = torch.tensor(likelihood.covariance).double()
    else:
        noise = posterior.likelihood.std().square().expand(2).diag()
    truth = torch.distributions.MultivariateNormal(outputs, covariance + noise)
    torch.testing.assert_close(prediction.mean, outputs)
    torch.testing.assert_close(prediction.aleatoric, noise.diagonal().expand(30, 2))
    torch.testing.assert_close(prediction.epistemic, covariance.diagonal(dim1=1, dim2=2))
    torch.testing.assert_close(prediction.std**2, truth.variance)
    torch.testing.assert_close(prediction.log_prob(targets), truth.log_prob(targets))
    metrics = posterior.evaluate((inputs, targets), linearised=True)
    assert metrics["nll"] == pytest.approx(-float(truth.log_prob(targets).mean()))


def test_outputs_without_an_axis_of_their_own() -> None:
    network = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)).double()
    inputs = normal(30, 4)
    posterior = Laplace().fit(network, (inputs, normal(30, seed=2)), Gaussian(std=0.5))
    prediction = posterior.predict(inputs, linearised=True)
    variance = covariances(posterior, inputs)[:, 0, 0]
    torch.testing.assert_close(prediction.epistemic, variance)
    truth = torch.distributions.Normal(network(inputs).detach(), (variance + 0.25).sqrt())
    torch.testing.assert_close(prediction.log_prob(normal(30, seed=2)), truth.log_prob(normal(30, seed=2)))
    assert posterior.predict(inputs[:1], linearised=True).mean.shape == (1,)


def test_draws_of_a_linear_model_agree_with_its_linearisation() -> None:
    network, inputs = nn.Linear(4, 2).double(), normal(20, 4)
    posterior = Laplace(structure=EFB()).fit(network, (inputs, normal(20, 2, seed=3)), Gaussian(std=0.5))
    closed = posterior.predict(inputs, linearised=True)
    count = 4000
    drawn = posterior.predict(inputs, count, seed=1)
    torch.testing.assert_close(drawn.mean, closed.mean, atol=5 * float(closed.epistemic.max() / count) ** 0.5, rtol=0)
    torch.testing.assert_close(drawn.epistemic, closed.epistemic, rtol=5 * (2 / count) ** 0.5, atol=0)


def test_inputs_of_every_form() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(4, 3), nn.Linear(2, 3)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return torch.tanh(self.left(a)) + self.right(b)

    network = Pair().double()
    inputs = {"a": normal(12, 4), "b": normal(12, 2)}
    posterior = Laplace(structure=KFAC()).fit(network, (inputs, labels(12)), Categorical())
    arrays = {key: value.numpy() for key, value in inputs.items()}
    expected = covariances(posterior, inputs)
    for form in (inputs, tuple(inputs.values()), arrays):
        prediction = posterior.predict(form, linearised=True)
        assert prediction.probs.shape == (12, 3)
    outputs, covariance = output_covariances(posterior, map_tensors(lambda t: t, inputs))
    torch.testing.assert_close(covariance, expected)
    with torch.inference_mode():
        inside = posterior.predict(map_tensors(lambda t: t * 1, inputs), linearised=True)
    assert torch.equal(inside.probs, prediction.probs)
    assert outputs.shape == (12, 3)


def test_the_network_is_left_as_it_was() -> None:
    network, inputs = cnn(), normal(12, 2, 6, 5)
    posterior = Laplace().fit(network, (inputs, labels(12)), Categorical())
    state = torch.get_rng_state()
    posterior.predict(inputs, linearised=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(p.requires_grad or p.grad is not None for p in posterior.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in posterior.network.modules())


class Branching(nn.Module):
    """Uses its second layer for inputs of two columns in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(inputs))
        if inputs.ndim == 3:
            hidden = torch.tanh(nn.functional.linear(hidden, self.body.weight.mT)).sum(1)
        return self.head(hidden)


def test_layers_that_are_used_in_another_way_are_refused() -> None:
    network = Branching().double()
    posterior = Laplace().fit(network, (normal(12, 4), labels(12)), Categorical())
    assert posterior.predict(normal(2, 3, 4), linearised=False).probs.shape == (2, 3)
    with pytest.raises(NetworkError, match=r"must use 'body\.weight' as it did on the rows it was surveyed"):
        posterior.predict(normal(2, 3, 4), linearised=True)


def test_a_posterior_of_an_older_file_surveys_its_network_by_the_first_rows() -> None:
    inputs = normal(12, 4)
    posterior = Laplace().fit(mlp(), (inputs, labels(12)), Categorical())
    expected = posterior.predict(inputs, linearised=True).probs
    older = copy.deepcopy(posterior)
    older._survey = older._cover = None
    del older.details["survey"]
    torch.testing.assert_close(older.predict(inputs, linearised=True).probs, expected)
    older._cover = None
    older.blocks = {name: block for name, block in older.blocks.items() if name != "2"}
    older._survey = survey(older.network, inputs, ["0.weight"])
    with pytest.raises(NetworkError, match="must use its layers as in the fit"):
        older.predict(inputs, linearised=True)


def test_the_method_says_how_to_predict_unless_told_otherwise(tmp_path):
    net, x = mlp(), normal(20, 4)
    by_draws, in_closed_form = (
        Laplace(structure=KFAC(), prior_precision=1.0, linearised=choice).fit(net, (x, labels(20, 3)), Categorical())
        for choice in (False, True)
    )
    drawn, exact = by_draws.predict(x).probs, by_draws.predict(x, linearised=True).probs
    assert not torch.allclose(drawn, exact)
    path = tmp_path / "posterior.safetensors"
    in_closed_form.save(path)
    for posterior in (in_closed_form, load(path, net)):
        torch.testing.assert_close(posterior.predict(x).probs, exact)
        torch.testing.assert_close(posterior.predict(x, linearised=False).probs, drawn)
