"""The page on layers of one's own: its code runs, and what it registers serves every method exactly."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import dubito
from dubito.layers import Dense, NoRule, Product, kind, survey
from dubito.layers.factors import Factor, Factors, NodeFactors
from dubito.layers.kinds import READERS
from dubito.layers.passes import asking
from dubito.layers.record import BlockPart, Record, recorded
from dubito.layers.stack import Stack

PAGE = Path(__file__).parents[2] / "docs" / "layers.md"
pytestmark = pytest.mark.filterwarnings("ignore::dubito.DubitoWarning")


@pytest.fixture(scope="module")
def page() -> Iterator[dict[str, Any]]:
    """The names of the page's code after it has run; its readers are taken back."""
    before, names = dict(READERS), {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        exec("\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)), names)
    yield names
    READERS.clear()
    READERS.update(before)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(params=["Conv1D", "LoRA", "Fused"])
def layer(request: pytest.FixtureRequest, page: dict[str, Any]) -> nn.Module:
    return page[request.param](4, 3).double().eval()


def test_gradients_of_rows_are_autograds(layer: nn.Module) -> None:
    inputs = normal(5, 4)
    seen = survey(layer, inputs)
    assert seen.reasons == {} and all(isinstance(use.form, Product) for use in seen.uses)
    record, named = Record(seen.layout_of), dict(layer.named_parameters())
    with recorded(layer, named, record) as shell:
        shell(inputs).sin().sum().backward()
    for row in range(5):
        truth = torch.autograd.grad(layer(inputs[row : row + 1]).sin().sum(), list(named.values()))
        for (name, _), expected in zip(named.items(), truth, strict=True):
            gradients = BlockPart(name, None, None).gradients(record.of((name, 0)), 5, slice(row, row + 1))
            torch.testing.assert_close(gradients[0], expected.flatten(), rtol=1e-12, atol=1e-14)


def test_factors_and_stacked_draws_are_a_loop(layer: nn.Module) -> None:
    inputs = normal(5, 4)
    seen = survey(layer, inputs)
    draws = {key: p.detach() + normal(3, *p.shape, seed=len(key)) for key, p in layer.named_parameters()}
    stack = Stack(draws, seen, draws=3, rows=5, repeated=True)
    with asking(layer, stack, stack.names) as shell:
        outputs = shell(torch.cat([inputs] * 3))
    truth = [functional_call(layer, {key: t[i] for key, t in draws.items()}, (inputs,)) for i in range(3)]
    torch.testing.assert_close(outputs, torch.cat(truth), rtol=1e-12, atol=1e-13)
    (use,) = [use for use in seen.uses if use.weight in ("weight", "base.weight")]
    name, weight = str(use.weight), layer.get_parameter(str(use.weight)).detach()
    s, r = normal(5, 4, seed=1), normal(5, 3, seed=2)  # of every row
    factors = NodeFactors(Factor(s[None], given=True), Factor(r[None], given=True))
    context = Factors({name: factors}, passes=1, rows=5)
    with asking(layer, context, context.names) as shell:
        outputs = shell(inputs)
    for row in range(5):
        matrix = torch.outer(s[row], r[row]) if weight.shape == (4, 3) else torch.outer(r[row], s[row])
        truth = functional_call(layer, {name: weight * matrix}, (inputs[row : row + 1],))
        torch.testing.assert_close(outputs[row : row + 1], truth, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("method", ["laplace-kfac", "rank1", "mean-field", "bali", "noisy-kfac", "batch-ensemble"])
def test_methods_treat_it(page: dict[str, Any], method: str) -> None:
    network = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), page["Fused"](5, 2))
    data = normal(8, 4).float(), normal(8, 2, seed=1).float()
    training = dubito.Training(epochs=1, batch_size=8, lr=1e-3)
    posterior = dubito.methods()[method].fit(network, data, dubito.Gaussian(std=1.0), training=training)
    (held,) = [line.holds for line in posterior.summary().rows if line.name == "2.weight"]
    assert "point (" not in held
    assert torch.isfinite(posterior.predict(data[0], 2).mean).all()


def test_a_python_function_becomes_one_that_is_seen(page: dict[str, Any]) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(normal(4, 3))

        def forward(self, x: Tensor) -> Tensor:
            return page["scaled_product"](x, self.weight)

    network, inputs = Scaled(), normal(5, 4)
    assert survey(network, inputs).reasons == {}
    record = Record(survey(network, inputs).layout_of)
    with recorded(network, ["weight"], record) as shell:
        outputs = shell(inputs)
        torch.testing.assert_close(outputs, network(inputs), rtol=1e-12, atol=0)
        outputs.sum().backward()
    gradients = BlockPart("weight", None, None).gradients(record.of(("weight", 0)), 5, slice(None))
    truth = 2 * inputs[:, :, None].expand(5, 4, 3)
    torch.testing.assert_close(gradients, truth.reshape(5, -1), rtol=1e-12, atol=0)


def test_a_reader_says_why_it_has_no_rule(page: dict[str, Any]) -> None:
    before = dict(READERS)
    try:

        @kind(torch.ops.shop.product)
        def refusing(at: Any, x: Tensor, weight: Tensor) -> Tensor:
            if weight.shape[1] > 2:
                raise NoRule("its outputs are too many")
            return at.use(Dense(weight.shape[1], weight.shape[0], turned=True), x, weight)

        wide, thin = page["Fused"](4, 3), page["Fused"](4, 2)
        assert survey(wide, torch.randn(3, 4)).reasons == {"weight": "its outputs are too many"}
        assert survey(thin, torch.randn(3, 4)).reasons == {}
    finally:
        READERS.clear()
        READERS.update(before)
