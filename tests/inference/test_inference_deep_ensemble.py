"""Deep ensembles: members apart, their starts, their batch norm, their noise."""

import copy
import math

import pytest
import torch
from torch import nn

import dubito
from dubito import MAP, Categorical, DeepEnsemble, Gaussian, NetworkError, Training, seeds

QUICK = Training(epochs=3, batch_size=16, lr=1e-2)


def network() -> nn.Module:
    with seeds.forked(0):
        return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def rows(count: int = 64):
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(1))
    return x, (x[:, 0] > 0).long()


def test_member_0_keeps_the_given_weights_and_the_others_are_new():
    still = Training(epochs=1, lr=1e-12)
    net = network()
    posterior = DeepEnsemble(members=3).fit(net, rows(), Categorical(), training=still)
    draws = [posterior.draw(k, None) for k in range(3)]
    torch.testing.assert_close(draws[0]["0.weight"], net[0].weight.detach())
    assert not torch.equal(draws[1]["0.weight"], draws[2]["0.weight"])
    assert not torch.allclose(draws[1]["0.weight"], draws[0]["0.weight"], atol=1e-3)
    bound = 3**-0.5  # the limits nn.Linear draws its weights from
    assert draws[1]["0.weight"].abs().max() <= bound + 1e-6
    assert draws[1]["0.weight"].std() == pytest.approx(bound / 3**0.5, rel=0.35)


def test_each_member_is_the_point_estimate_of_its_own_start():
    x, y = rows()
    x, net = x.double(), network().double()
    posterior = DeepEnsemble(members=2).fit(net, (x, y), Categorical(), training=QUICK, seed=5)
    alone = MAP().fit(net, (x, y), Categorical(), training=QUICK, seed=seeds.derived(5, "member", 0))
    outputs = posterior.sample_outputs(x, 4)
    torch.testing.assert_close(outputs[0], alone.sample_outputs(x, 1)[0], rtol=1e-7, atol=1e-7)
    assert torch.equal(outputs[0], outputs[2]) and torch.equal(outputs[1], outputs[3])
    assert posterior.num_atoms == posterior.num_components == 2
    torch.testing.assert_close(posterior.predict(x, 32).probs, outputs[:2].softmax(-1).mean(0))
    assert [entry["member"] for entry in posterior.history] == [0, 0, 0, 1, 1, 1]


def test_members_have_their_own_batch_norm_and_buffers_are_not_parameters(tmp_path):
    x, y = rows()
    posterior = DeepEnsemble(members=3).fit(network(), (x, y), Categorical(), training=QUICK)
    draws = [posterior.draw(k, None) for k in range(3)]
    means = [draw["1.running_mean"] for draw in draws]
    assert not torch.equal(means[0], means[1]) and not torch.equal(means[1], means[2])
    assert posterior.num_parameters == 3 * sum(p.numel() for p in network().parameters())
    folded = posterior.fold(2)
    assert torch.equal(folded[1].running_mean, means[2])
    posterior.save(tmp_path / "e.safetensors")
    again = dubito.load(tmp_path / "e.safetensors", network())
    assert torch.equal(again.sample_outputs(x, 3), posterior.sample_outputs(x, 3))


def test_learned_noise_stays_with_its_member():
    x, _ = rows(200)
    y = x[:, :1] + 0.2 * torch.randn(200, 1, generator=torch.Generator().manual_seed(3))
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    training = Training(epochs=40, batch_size=32, lr=1e-2)
    posterior = DeepEnsemble(members=2).fit(net, (x, y), Gaussian(), training=training)
    stds = [float(posterior.likelihood.std(k)) for k in range(2)]
    assert stds[0] != stds[1]
    prediction = posterior.predict(x)
    expected = (stds[0] ** 2 + stds[1] ** 2) / 2
    torch.testing.assert_close(prediction.aleatoric, torch.full((200, 1), expected))


def members_alone(net: nn.Module, data, seed: int, count: int):
    """Point estimates from the starts and with the orders that members have, each fitted by itself."""
    for member in range(count):
        start = copy.deepcopy(net)
        if member:
            with seeds.forked(seed, "start", member):
                start[0].reset_parameters()
                start[2].reset_parameters()
        own_seed = seeds.derived(seed, "member", member)
        yield MAP().fit(start, data, Gaussian(), training=QUICK, seed=own_seed)


def test_three_members_meet_their_own_noise():
    x, _ = rows(200)
    y = x[:, :1] + 0.2 * torch.randn(200, 1, generator=torch.Generator().manual_seed(3))
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    posterior = DeepEnsemble(members=3).fit(net, (x, y), Gaussian(), training=QUICK, seed=5)
    alone = list(members_alone(net, (x, y), 5, 3))
    stds = [float(point.likelihood.std()) for point in alone]
    assert len(set(stds)) == 3
    outputs = torch.cat([point.sample_outputs(x, 1) for point in alone])
    torch.testing.assert_close(posterior.sample_outputs(x, 3), outputs)
    for member, std in enumerate(stds):
        assert float(posterior.likelihood.std(member)) == pytest.approx(std, rel=1e-6)
        torch.testing.assert_close(posterior.fold(member)(x), outputs[member])
    # The mixture's density is that of each function with its own noise: other pairs give another number.
    noise = torch.tensor(stds)[:, None, None]
    each = torch.distributions.Normal(outputs, noise).log_prob(y).sum(-1)
    swapped = torch.distributions.Normal(outputs, noise[[0, 2, 1]]).log_prob(y).sum(-1)
    found = posterior.predict(x).log_prob(y)
    torch.testing.assert_close(found, each.logsumexp(0) - math.log(3))
    assert not torch.allclose(found, swapped.logsumexp(0) - math.log(3))


def test_parameters_without_a_rule_are_named():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.layer = nn.Parameter(torch.ones(3)), nn.Linear(3, 2)

        def forward(self, x):
            return self.layer(x * self.scale)

    net = nn.Sequential(Scaled())
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(NetworkError, match=r"anew: 0\.scale; give"):
        DeepEnsemble().fit(net, rows(), Categorical(), training=QUICK)
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    DeepEnsemble(members=1).fit(net, rows(), Categorical(), training=QUICK)  # no new start is needed


def test_checkpoints_per_member_resume(tmp_path):
    x, y = rows()
    whole = DeepEnsemble(members=2).fit(network(), (x, y), Categorical(), training=QUICK)
    path = tmp_path / "run.ckpt"
    DeepEnsemble(members=2).fit(network(), (x, y), Categorical(), training=QUICK, checkpoint=path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.ckpt.member-0", "run.ckpt.member-1"]
    again = DeepEnsemble(members=2).fit(network(), (x, y), Categorical(), training=QUICK, checkpoint=path)
    assert torch.equal(again.sample_outputs(x, 2), whole.sample_outputs(x, 2))


@pytest.mark.parametrize("settings", [{"members": 0}, {"members": 1.5}, {"prior_std": -1.0}])
def test_bad_settings(settings):
    with pytest.raises(dubito.ConfigError):
        DeepEnsemble(**settings)
