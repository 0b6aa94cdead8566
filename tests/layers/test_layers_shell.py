"""Private shells: networks of all sorts run on them with other tensors, and nothing shared is changed."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from dubito import MAP, BatchEnsemble, Categorical, Implicit, KTied, MCDropout, MeanField, NetworkError, Rank1
from dubito.layers import shell
from dubito.layers.shell import leased, seeded, take
from dubito.networks import run
from dubito.weight_normals import Reparameterised


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Module(nn.Module):
    """A network written as one function of its modules and inputs."""

    def __init__(self, forward: Callable[..., Tensor], **modules: Any) -> None:
        super().__init__()
        self.function = forward
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return 2 * x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore
        x, weight = ctx.saved_tensors
        return 2 * gradient @ weight.T, 2 * x.T @ gradient


class Bound(nn.Module):
    """Calls its layers through a plain list and a bound method."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)
        self.plain = [self.a, nn.Tanh(), self.b]
        self.step = self.a.forward

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.plain:
            x = layer(x)
        return x + self.b(self.step(rows(4)))


class Statistics(nn.Module):
    """Buffers: one updated in place, one assigned anew; a counter and a last value on `self`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("inplace", torch.zeros(3))
        self.register_buffer("assigned", torch.zeros(3))
        self.steps, self.last, self.cache = 0, None, {}

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) + self.assigned
        if self.training:
            with torch.no_grad():
                self.inplace.add_(y.mean(0))
            self.assigned = 0.5 * self.assigned + y.detach().mean(0)
            self.steps, self.last = self.steps + 1, y
            self.cache["y"] = y
        return y


def tied() -> nn.Module:
    net = Module(lambda self, x: self.b(torch.tanh(self.a(x))) @ self.a.weight, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    net.b.weight = net.a.weight
    return net


def hooked() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    net[0].register_forward_pre_hook(lambda module, args: (args[0] * module.weight.sum(),))
    net[1].register_forward_hook(lambda module, args, output: output + module.bias)
    return net


def twice() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer)


def checkpointed(reentrant: bool) -> nn.Module:
    body = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    return Module(
        lambda self, x: self.head(checkpoint(self.body, self.stem(x), use_reentrant=reentrant)),
        stem=nn.Linear(4, 4),
        body=body,
        head=nn.Linear(4, 3),
    )


def owned() -> nn.Module:
    net = Module(lambda self, x: torch.einsum("bi,io->bo", x, self.weight) * self.scale)
    net.weight, net.scale = nn.Parameter(rows(4, 3)), nn.Parameter(rows(3))
    return net


def frozen() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    net[0].requires_grad_(False)
    return net


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(rows(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return Doubled.apply(x, self.weight)  # pyright: ignore


ODD: dict[str, Callable[[], nn.Module]] = {
    "weight norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 3))),
    "orthogonal": lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 4)), nn.Linear(4, 3)),
    "spectral norm": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 3))),
    "scripted part": lambda: nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(4, 4))), nn.Linear(4, 3)),
    "own function": lambda: nn.Sequential(nn.Linear(4, 4), Functional()),
    "compiled": lambda: torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)), backend="eager"),
    "compiled part": lambda: nn.Sequential(torch.compile(nn.Linear(4, 4), backend="eager"), nn.Linear(4, 3)),
    "hooks": hooked,
    "checkpointed": lambda: checkpointed(False),
    "checkpointed reentrant": lambda: checkpointed(True),
    "tied": tied,
    "one module twice": twice,
    "plain lists": Bound,
    "own parameters": owned,
    "batch norm, frozen": frozen,
    "recurrent": lambda: Module(lambda self, x: self.gru(x[:, None])[0][:, 0], gru=nn.GRU(4, 3, batch_first=True)),
    "attention": lambda: nn.Sequential(nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)),
    "buffers": Statistics,
}  # fmt: skip
every_network = pytest.mark.parametrize("name", ODD)
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning"),
    # Reentrant checkpoints say so in passes without gradients.
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning"),
]


def made(name: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return ODD[name]().eval()


def drawn(network: nn.Module) -> dict[str, Tensor]:
    """Other values for all parameters, the results of a computation."""
    named = dict(network.named_parameters())
    return {n: (p.detach() + 0.3 * rows(*p.shape, seed=i)) for i, (n, p) in enumerate(named.items())}


def truth(plain: nn.Module, weights: dict[str, Tensor], x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Outputs and gradients of a network of its own that holds the weights as its parameters."""
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.requires_grad_(True).copy_(weights[name])
    outputs = plain(x)
    outputs.square().sum().backward()
    zero = [p.grad if p.grad is not None else torch.zeros_like(p) for p in plain.parameters()]
    return outputs.detach(), zero


def facts(network: nn.Module) -> list[Any]:
    tensors = [(id(t), t._version, t.requires_grad, t.grad) for t in (*network.parameters(), *network.buffers())]
    modules = [(id(m), m.training, tuple(m._forward_hooks), tuple(m._forward_pre_hooks)) for m in network.modules()]
    return [*tensors, *modules, *(list(vars(m)) for m in network.modules())]


@every_network
def test_given_tensors_are_what_a_network_runs_with_and_their_gradients_flow(name: str):
    network, x = made(name), rows(5, 4)
    weights, before = drawn(network), facts(network)
    values = copy.deepcopy(network.state_dict())
    for _ in range(2):  # the second time on a shell that waited
        outputs, gradients = truth(made(name), weights, x)
        leaves = {key: value.clone().requires_grad_() for key, value in weights.items()}
        answer = run(network, {key: 1.0 * value for key, value in leaves.items()}, x)
        torch.testing.assert_close(answer.detach(), outputs, rtol=0, atol=0)
        answer.square().sum().backward()
        for leaf, gradient in zip(leaves.values(), gradients, strict=True):
            own = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            torch.testing.assert_close(own, gradient, rtol=1e-6, atol=1e-7)
        del answer
        with torch.no_grad():
            assert torch.equal(run(network, {}, x), network(x))
    assert len(shell._pools[id(network)].idle) == 1
    assert facts(network) == before
    assert all(torch.equal(tensor, values[key]) for key, tensor in network.state_dict().items())


@every_network
def test_leases_at_once_do_not_see_each_other(name: str):
    network, x = made(name), rows(5, 4)
    weights = drawn(network)
    with torch.no_grad(), leased(network, weights) as one, leased(network) as other:
        assert one is not other and one is not network
        mixed = other(x), one(x)
    assert torch.equal(mixed[0], network(x).detach()) and torch.equal(mixed[1], truth(made(name), weights, x)[0])
    pool = shell._pools[id(network)]
    assert len(pool.idle) == 2
    given = {id(tensor) for tensor in weights.values()}
    assert not any(id(t) in given for each in pool.idle for slots in each.slots for t in slots.values())


@every_network
def test_detached_leases_compute_no_gradient_for_the_network(name: str):
    network, x = made(name), rows(5, 4)
    name, value = next((n, p) for n, p in drawn(network).items())
    leaf = value.requires_grad_()
    with leased(network, {name: leaf}, detached=True) as net:
        assert [n for n, p in net.named_parameters() if p.requires_grad] in ([name], [])
        net(x).sum().backward()
    assert leaf.grad is not None and all(p.grad is None for p in network.parameters())


def test_ordinary_copies_pickles_and_moves_know_nothing_of_shells():
    network, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval(), rows(5, 4)
    size = len(pickle.dumps(network))
    run(network, {}, x)
    assert len(pickle.dumps(network)) == size and vars(network).keys() == vars(nn.Sequential()).keys()
    other = copy.deepcopy(network)
    assert id(other) not in shell._pools
    network.double()  # replaces buffers, and what stands in parameters
    assert torch.equal(run(network, {}, x.double()), network(x.double()))
    number, watch = id(network), weakref.ref(network)
    del network
    gc.collect()
    assert watch() is None and number not in shell._pools


def test_shells_follow_what_is_changed_on_the_network():
    network, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)).eval(), rows(5, 4)

    def same() -> bool:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            expected = network(x)
            torch.manual_seed(0)
            return torch.equal(run(network, {}, x), expected)

    assert same()
    network[1].train()
    assert same()
    network[1].p = 0.9
    assert same()
    network[2] = nn.Linear(4, 2)
    assert same()
    handle = network[0].register_forward_hook(lambda module, args, output: 2 * output)
    assert same()
    handle.remove()
    assert same()
    network[0].bias = None
    assert same()
    network[0].weight = nn.Parameter(rows(4, 4))
    assert same()
    network.append(nn.Linear(2, 4))
    network[3].weight = nn.Parameter(network[2].weight.detach().T.contiguous())
    assert same()
    network[0].forward = lambda input: input @ network[0].weight  # an own forward pass
    assert same()


def test_new_ties_are_seen():
    network, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), rows(5, 4)
    run(network, {}, x)
    network[1].weight = network[0].weight
    weights = drawn(network)
    assert list(weights) == ["0.weight", "0.bias", "1.bias"]
    assert torch.equal(run(network, weights, x), truth(copy.deepcopy(network), weights, x)[0])


def test_training_passes_hand_back_what_they_assign_and_others_do_not():
    network, x = Statistics(), rows(5, 4)
    expected = copy.deepcopy(network).train()
    for _ in range(3):
        expected(x)
        assert take(network.eval(), training={}).outputs(x).grad_fn is not None
        assert not network.training
    for key, tensor in expected.state_dict().items():
        assert torch.equal(network.state_dict()[key], tensor), key
    assert network.steps == 3 and network.last is not None and network.last.grad_fn is None
    assert torch.equal(run(network, {}, x), expected.eval()(x))
    network.train()
    before = copy.deepcopy(network.state_dict())
    with leased(network, {"inplace": torch.zeros(3)}) as net:
        net(x)
    assert network.steps == 3 and all(torch.equal(t, before[k]) for k, t in network.state_dict().items())


def test_batch_statistics_reach_the_network():
    network, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval(), rows(9, 4)
    expected = copy.deepcopy(network).train()
    expected(x)
    take(network, {n: p.clone() for n, p in network.named_parameters()}, training={}).outputs(x)
    assert all(torch.equal(t, expected.state_dict()[k]) for k, t in network.state_dict().items())
    frozen_norm = copy.deepcopy(network)
    take(frozen_norm, training={"1": False}).outputs(x)
    assert all(torch.equal(t, network.state_dict()[k]) for k, t in frozen_norm.state_dict().items())


def test_a_shell_waits_for_the_graph_and_no_longer():
    network, x = Statistics(), rows(5, 4)
    outputs = [take(network, training={}).outputs(x) for _ in range(3)]
    pool = shell._pools[id(network)]
    assert len(pool.idle) == 0
    outputs[1].sum().backward()
    del outputs[1]
    assert len(pool.idle) == 1  # a cache of activations on the module keeps no graph
    outputs.clear()
    assert len(pool.idle) == 3


def test_a_network_that_hides_its_outputs_does_not_pile_up_shells():
    class Box:
        value = None

    class Hiding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.box = nn.Linear(4, 3), Box()

        def forward(self, x: Tensor) -> Tensor:
            self.box.value = self.layer(x)
            return self.box.value

    network = Hiding()
    for _ in range(3 * shell.MOST_KEPT):
        run(network, {}, rows(5, 4)).sum().backward()
    gc.collect()
    assert sum(type(each) is Hiding for each in gc.get_objects()) <= shell.MOST_KEPT + 2


def test_a_lease_of_a_shell_fills_it_anew():
    network, x = nn.Linear(4, 3), rows(5, 4)
    weights = drawn(network)
    with leased(network) as net:
        assert torch.equal(run(net, weights, x), F.linear(x, weights["weight"], weights["bias"]))
        assert torch.equal(run(net, {"bias": weights["bias"]}, x), F.linear(x, network.weight, weights["bias"]))
    assert torch.equal(run(network, {}, x), network(x))


def test_what_cannot_be_copied_or_is_unknown_is_refused():
    class Selfish(nn.Linear):
        def __deepcopy__(self, memo: Any) -> nn.Module:
            return self

    with pytest.raises(NetworkError, match="copies as itself"):
        take(nn.Sequential(Selfish(4, 3)))
    stuck = nn.Linear(4, 3)
    stuck.lock = __import__("threading").Lock()
    with pytest.raises(NetworkError, match="must be copyable"):
        take(stuck)
    with pytest.raises(NetworkError, match=r"parameter or buffer 'wieght'"):
        take(nn.Linear(4, 3), {"wieght": rows(3, 4)})


def test_noise_of_the_networks_own_is_seeded_and_the_rest_left_alone(monkeypatch):
    noisy, quiet = nn.Dropout(0.5), nn.Linear(4, 4)
    forks: list[Any] = []
    forked = shell.seeds.forked
    monkeypatch.setattr(shell.seeds, "forked", lambda *a, **k: forks.append(a) or forked(*a, **k))
    state = torch.get_rng_state()

    def outputs(network: nn.Module, seed: int, training: Any = None) -> Tensor:
        with seeded(network, seed, "noise", training=training):
            return take(network, training=training).outputs(torch.ones(5, 4))

    for _ in range(3):
        outputs(quiet, 0)
        outputs(noisy.eval(), 0)
    assert len(forks) == 2  # to find out
    once, again, other = (outputs(noisy, seed, {}) for seed in (0, 0, 1))
    assert torch.equal(once, again) and not torch.equal(once, other) and len(forks) == 5
    assert torch.equal(torch.get_rng_state(), state)


METHODS = {
    "map": MAP(),
    "mean field": MeanField(estimator=Reparameterised()),
    "k-tied": KTied(estimator=Reparameterised()),
    "rank1": Rank1(components=2),
    "rank1 loop": Rank1(components=2, arrangement="loop"),
    "batch ensemble": BatchEnsemble(components=2),
    "implicit": Implicit(components=2),
    "mc dropout": MCDropout(rate=0.3),
}


def checkpointed_gradients(method: str, *, reentrant: bool, plain: bool = False) -> dict[str, Tensor]:
    """Of two losses before their backward passes: each must recompute with its own weights."""
    network, x, y = (made("checkpointed reentrant" if reentrant else "checkpointed"), rows(6, 4), torch.arange(6) % 3)
    if plain:
        network.function = lambda self, x: self.head(self.body(self.stem(x)))
    built = METHODS[method].build(network, Categorical(), 6)
    one, other = (built.loss(x, y, generator=torch.Generator().manual_seed(s)).total for s in (0, 1))
    (one + 2 * other).backward()
    return {n: p.grad for n, p in built.draft.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_gradient_checkpointing_changes_no_gradient(method: str, reentrant: bool):
    if reentrant and method not in ("map", "batch ensemble", "mc dropout"):
        # The old kind runs a backward pass inside the backward pass, which drawn weights cannot go through twice:
        # PyTorch says so. What must not be is a wrong gradient.
        with pytest.raises(RuntimeError, match=r"use_reentrant=False|second time"):
            checkpointed_gradients(method, reentrant=True)
        return
    gradients = checkpointed_gradients(method, reentrant=reentrant)
    expected = checkpointed_gradients(method, reentrant=reentrant, plain=True)
    assert gradients.keys() == expected.keys() and gradients
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[key], rtol=1e-6, atol=1e-7)
