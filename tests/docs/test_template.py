"""The template of CONTRIBUTING is a whole method, and what its checklist says of registered methods holds."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F

import dubito
from dubito import Categorical, ConfigError, NetworkError, Training

ROOT = Path(__file__).parent.parent.parent


@cache
def template() -> dict[str, Any]:
    """What the code on the page defines."""
    block = re.search(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    assert block
    names: dict[str, Any] = {"__name__": "template_of_contributing"}
    exec(compile(block[1], "CONTRIBUTING.md", "exec"), names)
    return names


def problem() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        inputs = torch.randn(64, 3)
    return network, (inputs, (inputs[:, 0] > 0).long())


def test_it_is_fitted_predicts_and_comes_back_from_its_file(tmp_path):
    network, data = problem()
    method = template()["Isotropic"](initial_std=0.02)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    training = Training(epochs=20, batch_size=16, lr=0.05)
    posterior = method.fit(network, data, Categorical(), training=training, validation=data)
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    prediction = posterior.predict(data[0])
    assert (prediction.probs.argmax(-1) == data[1]).float().mean() > 0.9
    posterior.save(tmp_path / "isotropic.safetensors")
    loaded = dubito.load(tmp_path / "isotropic.safetensors", network)
    assert type(loaded) is type(posterior) and loaded.method == method
    assert torch.equal(loaded.predict(data[0]).probs, prediction.probs)


def test_its_divergence_and_its_draws_are_those_of_its_normals():
    network, _ = problem()
    objective = template()["Isotropic"](prior_std=0.7, initial_std=0.3).build(network, Categorical(), 64)
    weights = dict(network.named_parameters())
    raw = dict(objective.draft.group("raw_std").items())
    assert set(raw) == set(weights)
    prior = Normal(torch.tensor(0.0), 0.7)
    expected = sum(kl_divergence(Normal(weights[n], F.softplus(raw[n])), prior).sum() for n in weights)
    torch.testing.assert_close(objective.kl(), expected)
    posterior = objective.posterior()
    name = "0.weight"
    draws = torch.stack([posterior.draw(s, posterior.generator(0, s))[name] for s in range(2000)])
    # 2,000 draws: the mean's error is 0.3 / √2000 = 0.007, that of a standard deviation 0.005
    torch.testing.assert_close(draws.mean(0), weights[name].detach(), rtol=0, atol=0.035)
    torch.testing.assert_close(draws.std(0), torch.full_like(draws[0], 0.3), rtol=0, atol=0.025)


def test_it_keeps_frozen_parameters_and_refuses_what_it_cannot_do():
    kind = template()["Isotropic"]
    network, data = problem()
    network[0].requires_grad_(False)
    posterior = kind().fit(network, data, Categorical(), training=Training(epochs=1))
    assert set(posterior.group("raw_std").names) == posterior.trainable == {"2.weight", "2.bias"}
    assert torch.equal(posterior.draw(0, posterior.generator(0, 0))["0.weight"], network[0].weight)
    with pytest.raises(ConfigError, match="prior_std"):
        kind(prior_std=-1.0)
    with pytest.raises(NetworkError):
        kind().fit(network.requires_grad_(False), data, Categorical(), training=Training(epochs=1))


def test_registered_methods_are_exported_and_stand_in_the_readme():
    readme = (ROOT / "README.md").read_text()
    for name, method in dubito.methods().items():
        assert getattr(dubito, type(method).__name__) is type(method), f"dubito does not export {name}"
        row = re.search(rf"^\| .*`{name}`.*\| .*`{type(method).__name__}[`(].*\|", readme, re.MULTILINE)
        assert row, f"README.md has no row for {name}"


def test_the_checklist_names_files_that_are_there():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    paths = set(re.findall(r"`((?:src|tests|docs|papers)/[\w/.-]+\.(?:py|md))`", text))
    assert len(paths) > 12
    assert not [path for path in sorted(paths) if not (ROOT / path).is_file()]
