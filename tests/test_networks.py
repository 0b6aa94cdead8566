"""Copies of networks: made, run, named, and never the user's own."""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from dubito import MAP, Gaussian, Training
from dubito.errors import ConfigError, NetworkError, UnknownNameError
from dubito.layers.shell import leased
from dubito.networks import copied, frozen_modes, resolve, run, trainable, with_flags, with_weights


class Tied(nn.Module):
    """An encoder and a decoder that share one weight, with a bias of its own each."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(3, 3), nn.Linear(3, 3)
        self.decoder.weight = self.encoder.weight
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.norm(self.encoder(x)))


def sample_net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))


def test_a_copy_shares_nothing_and_leaves_the_original_as_it_was():
    net = sample_net()
    net[0].requires_grad_(False)
    net[1].eval()
    net(torch.rand(5, 3)).sum().backward()
    before = copy.deepcopy(net.state_dict())
    gradients = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
    network = copied(net)
    assert [m.training for m in network.modules()] == [m.training for m in net.modules()]
    for (name, own), (other, new) in zip(net.named_parameters(), network.named_parameters(), strict=True):
        assert name == other and torch.equal(own, new) and own.data_ptr() != new.data_ptr()
        assert own.requires_grad == new.requires_grad
        assert new.grad is None
    with torch.no_grad():
        for tensor in network.state_dict().values():
            tensor.add_(1)
    network.train()
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    for parameter, gradient in zip(net.parameters(), gradients, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        assert gradient is None or torch.equal(parameter.grad, gradient)
    assert not net[1].training


def test_ties_survive_the_copy():
    network = copied(Tied())
    assert network.decoder.weight is network.encoder.weight


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (torch.tanh, "must be an nn.Module, got builtin_function_or_method"),
        (nn.Linear, "must be an nn.Module, got type"),
        (nn.Sequential(nn.ReLU()), "must have parameters, got none"),
        (nn.LazyLinear(3), "parameter 'weight' is not initialised; run the network on one batch"),
    ],
)
def test_networks_that_cannot_be_treated(net, message: str):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # lazy modules warn that they are new
        with pytest.raises(NetworkError, match=message):
            copied(net)


def test_a_network_without_numbers_is_refused():
    with pytest.raises(NetworkError, match=r"'weight' is on the meta device"):
        MAP().fit(nn.Linear(2, 1, device="meta"), (torch.randn(4, 2), torch.randn(4, 1)), Gaussian())


def test_a_single_row_is_told_what_it_needs():
    posterior = MAP().fit(
        nn.Linear(2, 1), (torch.randn(4, 2), torch.randn(4, 1)), Gaussian(), training=Training(epochs=1)
    )
    with pytest.raises(NetworkError, match=r"x\[None\]"):
        posterior.predict(torch.randn(2))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(value: float):
    net = sample_net()
    with torch.no_grad():
        net[3].bias[1] = value
    with pytest.raises(NetworkError, match=r"parameter '3\.bias' holds NaN or infinity"):
        copied(net)


def test_old_norms_cannot_be_copied_and_the_remedy_is_named():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PyTorch itself calls them old
        old = (nn.utils.weight_norm(nn.Linear(3, 2)), nn.utils.spectral_norm(nn.Linear(3, 2)))
    for layer in old:
        net = nn.Sequential(nn.Linear(3, 3), layer)
        for _ in range(2):  # fresh, and after a run without gradients, when a deep copy would succeed
            with pytest.raises(NetworkError, match=r"copyable, but '1' .*torch\.nn\.utils\.parametrizations"):
                copied(net)
            with torch.no_grad():
                net(torch.rand(2, 3))


def test_activations_kept_on_a_module_do_not_hinder_the_copy():
    class Keeps(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.last = super().forward(x)
            return self.last

    net = Keeps(3, 2)
    net(torch.rand(4, 3))
    network = copied(net)
    assert torch.equal(network.last, net.last) and not network.last.requires_grad
    assert net.last.grad_fn is not None  # the user's own keeps its graph
    net.kept = [net.last * 2]
    with pytest.raises(NetworkError, match=r"copyable, but copy\.deepcopy failed"):
        copied(net)


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_the_remedy_works(norm):
    torch.manual_seed(0)
    net = nn.Sequential(norm(nn.Linear(3, 2))).eval()
    x = torch.rand(4, 3)
    network = copied(net)
    weights = {name: parameter * 2 for name, parameter in network.named_parameters()}
    assert all(name.startswith("0.parametrizations.weight") or name == "0.bias" for name in weights)
    plain = copied(net)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(weights[name])
    torch.testing.assert_close(run(network, weights, x), plain(x))
    torch.testing.assert_close(network(x), net(x))  # what was put in for the run is out again


def test_a_run_uses_the_given_weights_wherever_they_are_tied():
    net = Tied().eval()
    x = torch.rand(4, 3)
    new = torch.rand(3, 3)
    own = net.encoder.weight.clone()
    outputs = run(net, {"encoder.weight": new, "norm.running_mean": torch.ones(3)}, x)
    hidden = nn.functional.linear(x, new, net.encoder.bias)
    hidden = (hidden - 1) / (net.norm.running_var + net.norm.eps).sqrt()
    torch.testing.assert_close(outputs, nn.functional.linear(hidden, new, net.decoder.bias))
    assert torch.equal(net.encoder.weight, own)


def test_a_run_hands_over_named_and_several_inputs():
    net = nn.Bilinear(2, 3, 4)
    a, b = torch.rand(5, 2), torch.rand(5, 3)
    weights = {name: p * 3 for name, p in net.named_parameters()}
    expected = nn.functional.bilinear(a, b, weights["weight"], weights["bias"])
    torch.testing.assert_close(run(net, weights, (a, b)), expected)
    torch.testing.assert_close(run(net, weights, {"input2": b, "input1": a}), expected)


def test_a_training_lease_keeps_frozen_parts_and_leaves_the_network_in_evaluation_mode():
    net = sample_net()
    net[1].eval()
    modes = frozen_modes(net)
    assert modes == {"1": False}
    network = copied(net).eval()
    with leased(network, training=modes) as shell:
        assert [m.training for m in shell.children()] == [True, False, True, True]
        assert not any(m.training for m in network.modules())
    with pytest.raises(RuntimeError, match="inside"), leased(network, training={}) as shell:
        assert all(m.training for m in shell.modules())
        raise RuntimeError("inside")
    with leased(network) as shell:
        assert not any(m.training for m in shell.modules())


def test_a_network_wholly_in_evaluation_mode_asks_for_nothing():
    assert frozen_modes(sample_net().eval()) == {}
    assert frozen_modes(sample_net().train()) == {}


def test_trainable_parameters_are_the_users_own():
    net = sample_net()
    net[0].requires_grad_(False)
    assert list(trainable(net)) == ["1.weight", "1.bias", "3.weight", "3.bias"]
    assert list(trainable(Tied())) == ["encoder.weight", "encoder.bias", "decoder.bias", "norm.weight", "norm.bias"]


def test_subsets_by_name_module_and_predicate():
    net = sample_net()
    assert resolve(None, net) == tuple(name for name, _ in net.named_parameters())
    assert resolve(["3.bias", "0"], net) == ("0.weight", "0.bias", "3.bias")  # in the network's order
    assert resolve(lambda name, tensor: tensor.ndim == 2, net) == ("0.weight", "3.weight")
    assert resolve(iter(["1"]), net) == ("1.weight", "1.bias")  # pyright: ignore[reportArgumentType]


def test_a_name_is_not_a_prefix():
    net = nn.ModuleDict({"fc1": nn.Linear(1, 1), "fc10": nn.Linear(1, 1)})
    assert resolve(["fc1"], net) == ("fc1.weight", "fc1.bias")


def test_tied_parameters_are_found_by_all_their_names():
    net = Tied()
    assert resolve(["decoder.weight"], net) == ("encoder.weight",)
    assert resolve(["decoder"], net) == ("encoder.weight", "decoder.bias")


def test_subsets_that_pick_nothing_are_refused():
    net = sample_net()
    with pytest.raises(UnknownNameError, match=r"unknown parameter or module '3\.wieght', did you mean '3\.weight'"):
        resolve(["3.wieght"], net)
    with pytest.raises(ConfigError, match=r"list of names or a predicate, got 'head'; give \['head'\]"):
        resolve("head", net)
    for nothing in ([], lambda name, tensor: False):
        with pytest.raises(ConfigError, match="at least one parameter, got none of"):
            resolve(nothing, net)
    net[0].requires_grad_(False)
    with pytest.raises(ConfigError, match="'0', which is frozen"):
        resolve(["0", "3"], net)
    with pytest.raises(NetworkError, match="all have requires_grad=False"):
        resolve(None, net.requires_grad_(False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_network_with_other_weights_is_a_copy(dtype: torch.dtype):
    net = Tied().to(dtype).eval()
    new = {"encoder.weight": torch.rand(3, 3, dtype=dtype), "norm.running_var": torch.full((3,), 4.0, dtype=dtype)}
    plain = with_weights(net, new)
    x = torch.rand(2, 3, dtype=dtype)
    torch.testing.assert_close(plain(x), run(net, new, x))
    assert plain.decoder.weight is plain.encoder.weight
    with torch.no_grad():
        plain.encoder.weight.zero_()
    assert new["encoder.weight"].abs().sum() > 0 and net.encoder.weight.abs().sum() > 0


def test_flags_are_set_as_named():
    net = with_flags(sample_net(), {"0.bias", "3.weight"})
    assert [name for name, p in net.named_parameters() if p.requires_grad] == ["0.bias", "3.weight"]


def test_sparse_gradients_are_refused():
    with pytest.raises(NetworkError, match="'0' has sparse gradients"):
        copied(nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 1)))
