"""Every registered method keeps the same contract."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call

import dubito
from dubito import Bernoulli, Categorical, DubitoWarning, Gaussian
from dubito.inputs import call, take
from dubito.posterior import Posterior

from .cases import METHODS, NETWORKS, QUICK, fitted, fresh, make, rows

# So little training on labels drawn at random: post-hoc methods rightly say that it shows.
pytestmark = pytest.mark.filterwarnings("ignore:the network is no better than a constant:dubito.DubitoWarning")
every_method = pytest.mark.parametrize("method", METHODS)
every_network = pytest.mark.parametrize("network", NETWORKS)
REGRESSED = {"bali"}  # weights are solved for, not moved at a learning rate


@every_method
@every_network
def test_shapes_samples_and_untouched_network(method: str, network: str):
    before = make(network)
    state = copy.deepcopy(before.net.state_dict())
    flags = [(p.requires_grad, p.grad) for p in before.net.parameters()]
    posterior, case = fitted(method, network)
    for name, tensor in case.net.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    assert flags == [(p.requires_grad, p.grad) for p in case.net.parameters()]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in case.net.modules())
    assert case.net.training

    outputs = posterior.sample_outputs(case.inputs, 5, seed=1)
    assert outputs.shape == (5, 12, 3)
    assert outputs.isfinite().all() and not outputs.requires_grad
    different = len({tuple(one.flatten().tolist()) for one in outputs})
    atoms = posterior.num_atoms
    assert different == (atoms or 5)  # as many as it says, or all of them
    prediction = posterior.predict(case.inputs, 5, seed=1)
    # Rounded up to as many draws of every component.
    count = atoms or -(-5 // posterior.num_components) * posterior.num_components
    drawn = posterior.sample_outputs(case.inputs, count, seed=1)
    torch.testing.assert_close(prediction.probs, drawn.softmax(-1).mean(0))
    torch.testing.assert_close(prediction.total, prediction.aleatoric + prediction.epistemic)
    assert (prediction.epistemic >= 0).all() and (prediction.aleatoric >= 0).all()
    assert prediction[3:5].probs.shape == (2, 3)


@every_method
@every_network
def test_draws_are_the_networks_own_parameters(method: str, network: str):
    posterior, case = fitted(method, network)
    weights = posterior.draw(2, posterior.generator(1, 2))
    own = dict(case.net.named_parameters())
    assert set(own) <= set(weights) <= set(own) | {name for name, _ in case.net.named_buffers()}
    assert all(weights[name].shape == own[name].shape for name in own)
    assert not any(tensor.requires_grad for tensor in weights.values())
    buffers = dict(posterior.network.named_buffers())
    plain = copy.deepcopy(case.net).eval()
    answer = call(lambda *a, **k: functional_call(plain, {**buffers, **weights}, a, k), case.inputs)
    outputs = posterior.sample_outputs(case.inputs, 3, seed=1)
    torch.testing.assert_close(answer.detach(), outputs[2])
    folded = posterior.fold(2, seed=1)
    assert type(folded) is type(case.net)
    torch.testing.assert_close(call(folded, case.inputs).detach(), outputs[2])
    assert [p.requires_grad for p in folded.parameters()] == [p.requires_grad for p in case.net.parameters()]
    with torch.no_grad():
        next(folded.parameters()).add_(1.0)  # a fold owns its tensors
    assert torch.equal(posterior.sample_outputs(case.inputs, 3, seed=1), outputs)


@every_method
@every_network
def test_same_seed_same_numbers_whatever_the_chunks(method: str, network: str):
    torch.manual_seed(11)
    state = torch.get_rng_state()
    first, case = fitted(method, network)
    second, _ = fresh(method, network)
    whole = first.sample_outputs(case.inputs, 4, seed=9)
    assert torch.equal(whole, second.sample_outputs(case.inputs, 4, seed=9))
    torch.testing.assert_close(whole, first.sample_outputs(case.inputs, 4, seed=9, max_rows=5))
    torch.testing.assert_close(whole[:2], first.sample_outputs(case.inputs, 2, seed=9))
    torch.testing.assert_close(whole[:, 3:4], first.sample_outputs(take(case.inputs, slice(3, 4)), 4, seed=9))
    if first.num_atoms is None:
        assert not torch.equal(whole, first.sample_outputs(case.inputs, 4, seed=10))
    assert torch.equal(torch.get_rng_state(), state)  # the global state is left alone


@every_method
@every_network
def test_saved_and_loaded(method: str, network: str, tmp_path):
    posterior, case = fitted(method, network)
    posterior, plain = copy.deepcopy(posterior), make(network).net
    for dtype in (torch.float32, torch.float64):
        posterior = posterior.to(dtype)
        posterior.save(tmp_path / "p.safetensors")
        again = dubito.load(tmp_path / "p.safetensors", plain)
        expected = posterior.sample_outputs(case.inputs, 3, seed=2)
        assert expected.dtype == dtype
        assert torch.equal(again.sample_outputs(case.inputs, 3, seed=2), expected)
        assert again.num_parameters == posterior.num_parameters and again.nbytes == posterior.nbytes
        assert str(again.summary()) == str(posterior.summary())
        assert again.method == posterior.method
    if network == "shared":
        assert again.network.tied.weight is again.network.twice.weight


@every_method
def test_double_precision_throughout(method: str):
    case = make("mlp")
    posterior = METHODS[method].fit(
        case.net.double(), (case.inputs.numpy(), case.targets.numpy()), Categorical(), training=QUICK
    )
    probs = posterior.predict(case.inputs, 4).probs
    assert probs.dtype == torch.float64
    torch.testing.assert_close(probs, folded_probs(posterior, case.inputs.double(), 4), rtol=1e-12, atol=0)
    weights = posterior.draw(0, posterior.generator(0, 0))
    assert not any(torch.equal(value, value.float().double()) for value in weights.values())


def folded_probs(posterior: Posterior, inputs, num_samples: int) -> torch.Tensor:
    """The mean of the probabilities of plain networks with the draws in them, without any of ours in between."""
    count = posterior.num_atoms or -(-num_samples // posterior.num_components) * posterior.num_components
    with torch.no_grad():
        return torch.stack([call(posterior.fold(s), inputs).softmax(-1) for s in range(count)]).mean(0)


@every_method
@pytest.mark.parametrize("count", [1, 2000])
def test_one_example_and_a_large_batch(method: str, count: int):
    posterior, case = fitted(method, count=count)
    whole = posterior.predict(case.inputs, 3).probs
    assert whole.shape == (count, 3)
    torch.testing.assert_close(whole[-1:], folded_probs(posterior, case.inputs[-1:], 3))
    torch.testing.assert_close(whole, posterior.predict(case.inputs, 3, max_rows=700).probs)


@every_method
def test_regression_learns_its_noise(method: str, tmp_path):
    x = rows((64, 2))
    y = x.sum(1, keepdim=True) * 2 + 0.1 * rows((64, 1), 7)
    net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))
    for likelihood in (Gaussian(), Gaussian(std=0.3)):
        posterior = METHODS[method].fit(net, (x, y), likelihood, training=QUICK)
        prediction = posterior.predict(x, 4, seed=1)
        assert prediction.mean.shape == (64, 1)
        torch.testing.assert_close(prediction.std**2, prediction.aleatoric + prediction.epistemic)
        assert set(posterior.evaluate((x, y[:, 0]), num_samples=4)) >= {"nll", "rmse", "mae", "crps", "coverage"}
        posterior.save(tmp_path / "r.safetensors")
        again = dubito.load(tmp_path / "r.safetensors", net)
        assert torch.equal(again.predict(x, 4, seed=1).log_prob(y), prediction.log_prob(y))


@every_method
def test_binary(method: str):
    x = rows((64, 2))
    net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))
    posterior = METHODS[method].fit(net, (x, (x[:, 0] > 0).long()), Bernoulli(), training=QUICK)
    probs = posterior.predict(x, 4, seed=3).probs
    assert probs.shape == (64, 1)
    right = ((probs[:, 0] > 0.5) == (x[:, 0] > 0)).double().mean().item()
    scores = posterior.evaluate((x, (x[:, 0] > 0)), num_samples=4, seed=3)
    assert scores["accuracy"] == pytest.approx(right)


@every_method
def test_frozen_parameters_stay(method: str):
    case = make("nested")
    case.net.stem.requires_grad_(False)
    posterior = METHODS[method].fit(case.net, (case.inputs, case.targets), Categorical(), training=QUICK)
    assert torch.equal(posterior.network.stem[0].weight, case.net.stem[0].weight)
    assert not posterior.fold(0).stem[0].weight.requires_grad


@every_method
def test_gradients_with_respect_to_inputs_on_request(method: str):
    posterior, case = fitted(method)
    inputs = case.inputs.clone().requires_grad_()
    outputs = posterior.sample_outputs(inputs, 2, keep_graph=True)
    assert torch.autograd.grad(outputs.sum(), inputs)[0].abs().sum() > 0


@every_method
def test_the_summary_names_every_parameter(method: str):
    posterior, case = fitted(method, "nested")
    names = [row.name for row in posterior.summary().rows]
    assert names == [name for name, _ in case.net.named_parameters()]
    assert sum(row.num_parameters for row in posterior.summary().rows) == posterior.num_parameters


@every_method
def test_datasets_and_loaders_give_what_tensors_give(method: str):
    case = make("mlp", 40)
    pairs = torch.utils.data.TensorDataset(case.inputs, case.targets)
    subset = torch.utils.data.Subset(pairs, range(40))  # read item by item
    loader = torch.utils.data.DataLoader(subset, batch_size=8, shuffle=True)
    expected = fitted(method, "mlp", 40)[0].sample_outputs(case.inputs, 3)
    for data in (pairs, subset, loader):
        posterior = METHODS[method].fit(case.net, data, Categorical(), training=QUICK)
        torch.testing.assert_close(posterior.sample_outputs(case.inputs, 3), expected)
        assert posterior.evaluate(data) == pytest.approx(posterior.evaluate((case.inputs, case.targets)))


@every_method
def test_post_hoc_and_trained_start_from_the_given_weights(method: str):
    if method in REGRESSED:
        pytest.skip("its first step replaces all weights, whatever the learning rate")
    case = make("mlp")
    still = dubito.Training(epochs=1, lr=1e-12)
    posterior = METHODS[method].fit(case.net, (case.inputs, case.targets), Categorical(), training=still)
    for name, parameter in case.net.named_parameters():
        torch.testing.assert_close(posterior.weights()[name], parameter.detach())


def test_partly_covered_networks_are_named():
    case = make("mlp")
    normed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 3))
    with pytest.warns(DubitoWarning, match=r"0\.parametrizations\.weight\.original0"):
        METHODS["laplace-diag"].fit(normed, (case.inputs, case.targets), Categorical(), training=QUICK)
