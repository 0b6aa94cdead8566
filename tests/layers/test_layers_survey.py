"""The survey: where rows lie, in which order weights are used, which of them read the inputs."""

import json
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dubito.layers import Layout, Survey, Use, reasons, survey


class Through(nn.Module):
    """A linear layer between two changes of shape: `there` on the way in, `back` on the way out."""

    def __init__(self, there: Callable[[Tensor], Tensor], width: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.layer = nn.Linear(width, 5)
        self.there = there

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        self.layer(self.there(hidden))
        return hidden


def rows(count: int, *shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed))


def seen(network: nn.Module, inputs: object) -> dict[str, list[Use]]:
    """The uses of weights by their layers' names, in the order of the first calls."""
    uses: dict[str, list[Use]] = {}
    for use in survey(network.eval(), inputs).uses:
        uses.setdefault(str(use.weight).removesuffix(".weight"), []).append(use)
    return uses


def layout(network: nn.Module, inputs: object, name: str = "layer") -> Layout:
    (use,) = seen(network, inputs)[name]
    return use.layout


LAYOUTS = {
    "rows first": (lambda h: h, Layout.ROWS),
    "time-major": (lambda h: h.transpose(0, 1), Layout.SECOND),
    "row by row": (lambda h: h.flatten(0, 1), Layout.FLAT),
    "position by position": (lambda h: h.transpose(0, 1).flatten(0, 1), Layout.FLAT_SECOND),
    "mean over positions": (lambda h: h.mean(1), Layout.ROWS),
    "rows last": (lambda h: h.permute(1, 2, 0).sum(-1), Layout.UNKNOWN),
    "rows mixed": (lambda h: h - h.mean(0), Layout.UNKNOWN),
}


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_of_a_hidden_layer(name: str, count: int) -> None:
    there, expected = LAYOUTS[name]
    network, inputs = Through(there), rows(count, 3, 4)  # as many positions as rows of the dry run
    if name == "rows mixed" and count == 1:
        # The only row is run twice beside itself, and the mean of equal rows is that row.
        expected = Layout.ROWS
    assert layout(network, inputs) is expected
    assert layout(network, inputs, "first") is Layout.ROWS


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("name", ["row by row", "position by position"])
def test_layout_does_not_depend_on_the_scale_of_activations(name: str, scale: float) -> None:
    there, expected = LAYOUTS[name]
    network = Through(there)
    with torch.no_grad():
        network.first.weight.mul_(0).add_(torch.eye(4))
        network.first.bias.zero_()
    network.there = lambda hidden: there(torch.atanh(hidden.double().clamp(-0.999, 0.999)).float() * scale)
    assert layout(network, rows(3, 5, 4)) is expected


def test_positions_that_are_all_alike_tell_nothing() -> None:
    there, _ = LAYOUTS["position by position"]
    alike = rows(1, 1, 4).expand(3, 5, 4).contiguous()
    assert layout(Through(there), alike) is Layout.UNKNOWN


def test_one_position_flattened_is_rows_first() -> None:
    assert layout(Through(lambda h: h.flatten(0, 1)), rows(3, 1, 4)) is Layout.ROWS


def test_rounding_of_low_precision_is_not_another_row() -> None:
    # Kernels for other batch sizes may round otherwise, by a last digit of bfloat16 here.
    there, expected = LAYOUTS["row by row"]
    network = Through(lambda h: there(h if len(h) == 1 else h * (1 + 2**-7))).to(torch.bfloat16)
    assert layout(network, rows(3, 5, 4).to(torch.bfloat16)) is expected


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(60_000, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embedding(ids.T.flatten()).unflatten(0, ids.T.shape).mean(0)


def test_neighbouring_token_numbers_are_told_apart() -> None:
    ids = 50_000 + torch.arange(12).reshape(3, 4)  # within a thousandth of each other
    assert layout(Tokens(), ids, "embedding") is Layout.FLAT_SECOND


class Calls(nn.Module):
    """Called in another order than registered; one layer twice, one never."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.never = nn.Linear(4, 4)
        self.twice = nn.Linear(4, 4)
        self.alias = self.twice
        self.stem = nn.Linear(3, 4)

    def forward(self, *, left: Tensor, right: Tensor) -> Tensor:
        hidden = self.stem(input=left * right)
        return self.head(self.alias(torch.tanh(self.twice(hidden))))


def test_order_counts_aliases_and_modules_never_called() -> None:
    uses = seen(Calls(), {"left": rows(5, 3), "right": rows(5, 3, seed=1)})
    assert {name: [use.calls for use in several] for name, several in uses.items()} == {
        "stem": [1],
        "twice": [2],
        "head": [1],
    }
    assert list(uses) == ["stem", "twice", "head"]
    assert {use.layout for several in uses.values() for use in several} == {Layout.ROWS}


def test_calls_that_disagree_are_told_one_by_one() -> None:
    class Both(Through):
        def forward(self, inputs: Tensor) -> Tensor:
            hidden = super().forward(inputs)
            self.layer(hidden)
            return hidden

    uses = seen(Both(lambda h: h.transpose(0, 1)), rows(3, 5, 4))["layer"]
    assert [(use.index, use.layout) for use in uses] == [(0, Layout.SECOND), (1, Layout.ROWS)]


def test_calls_that_depend_on_the_rows_are_unknown() -> None:
    class More(Through):
        def forward(self, inputs: Tensor) -> Tensor:
            hidden = super().forward(inputs)
            return self.layer(hidden) if len(inputs) > 1 else hidden

    assert {use.layout for use in seen(More(lambda h: h), rows(3, 5, 4))["layer"]} == {Layout.UNKNOWN}


def test_one_call_per_row_is_unknown() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, inputs: Tensor) -> Tensor:
            return torch.stack([self.layer(row) for row in inputs])

    (use,) = seen(Loop(), rows(3, 4))["layer"]
    assert use.layout is Layout.UNKNOWN
    assert use.calls == 3


class Branches(nn.Module):
    def __init__(self, prepare: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.prepare = prepare
        self.left, self.right, self.head = nn.Linear(2, 4), nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        prepared = self.prepare(inputs)
        hidden = torch.relu(self.left(prepared[:, :2]))
        return self.head(hidden + self.right(prepared[:, 2:]))


@pytest.mark.parametrize("prepare", [lambda x: x, lambda x: (x - 1) / 2], ids=["as they come", "normalised"])
def test_every_branch_that_reads_the_inputs_is_found(prepare: Callable[[Tensor], Tensor]) -> None:
    uses = seen(Branches(prepare), rows(5, 4))
    assert {name: use.reads_input for name, (use,) in uses.items()} == {"left": True, "right": True, "head": False}


def test_several_inputs_are_all_inputs() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.numbers, self.head = nn.Embedding(9, 4), nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
            return self.head(self.tokens(ids).mean(1) + self.numbers(numbers))

    ids = torch.randint(9, (4, 6), generator=torch.Generator().manual_seed(0))
    uses = seen(Pair(), (ids, rows(4, 3)))
    assert {name for name, (use,) in uses.items() if use.reads_input} == {"tokens", "numbers"}


def test_padded_encoders_are_seen_through() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    network = nn.TransformerEncoder(layer, 2).eval()
    mask = torch.tensor([[False, False, True]]).expand(4, 3).contiguous()
    inputs = {"src": rows(4, 3, 8), "src_key_padding_mask": mask}
    assert [layout(network, inputs, f"layers.{i}.linear1") for i in range(2)] == [Layout.ROWS, Layout.ROWS]
    assert network.use_nested_tensor


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        self.layer(inputs)
        raise RuntimeError("broken")


def test_an_error_leaves_no_hooks() -> None:
    network = Failing()
    with pytest.raises(RuntimeError, match="broken"):
        seen(network, rows(3, 4))
    assert not network.layer._forward_pre_hooks


def test_a_norm_before_the_first_matrix_only_prepares_the_inputs() -> None:
    network = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    uses = seen(network, rows(5, 4))
    assert uses["1"][0].reads_input and not uses["3"][0].reads_input


def test_random_networks_leave_the_global_state_alone() -> None:
    class Noisy(Through):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(nn.functional.dropout(inputs, 0.5, training=True))

    network = Noisy(lambda h: h)
    before = torch.get_rng_state()
    seen(network, rows(3, 5, 4))
    assert torch.equal(torch.get_rng_state(), before)


# -- reasons -----------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """One parameter for every way in which the rows' own gradients cannot be told."""

    def __init__(self) -> None:
        super().__init__()
        self.einsum = nn.Parameter(torch.ones(4, 4))
        self.positions = nn.Parameter(torch.ones(4, 4))
        self.unread = nn.Parameter(torch.ones(2))
        self.touching = nn.Linear(4, 4)
        self.twice = nn.Parameter(torch.ones(4, 4))
        self.cut = nn.Linear(4, 4)
        self.split = nn.Parameter(torch.ones(8, 4))
        self.fed = nn.Parameter(torch.ones(4, 4))
        self.plain = nn.Parameter(torch.ones(4, 4))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.einsum("bi,ij->bj", x, self.einsum)
        x = x + nn.functional.embedding(torch.arange(1), self.positions)
        x = x @ self.twice + x * self.twice.sum()
        x = x + self.cut(x).detach()
        x = x + nn.functional.linear(self.fed, self.plain).sum()
        x = self.normed(x)
        touched = self.touching(x)
        return x + touched - touched.mean(0)


def test_every_parameter_has_a_reason_or_a_use() -> None:
    network = Odd()
    found = survey(network.eval(), rows(3, 4))
    assert found.reasons == {
        "einsum": "there is no rule for the way einsum uses it",
        "positions": reasons.NO_ROWS,
        "unread": reasons.UNREAD,
        "twice": "there is no rule for the way sum uses it",
        "split": reasons.UNREAD,
        "fed": "another parameter is its input",
        "plain": "another parameter is its input",
        "touching.weight": reasons.MISREAD,
        "touching.bias": reasons.MISREAD,
        "cut.weight": reasons.UNREACHED,
        "cut.bias": reasons.UNREACHED,
        "normed.bias": reasons.MISREAD,
        "normed.parametrizations.weight.original0": reasons.PARAMETRISED,
        "normed.parametrizations.weight.original1": reasons.PARAMETRISED,
    }
    for name, _ in network.named_parameters():
        assert (name in found.reasons) or found.of(name), name
    assert Survey.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_asking_a_parameter_for_its_sizes_is_no_use() -> None:
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            assert self.weight.size() == self.weight.shape and self.weight.size(0) == 4
            assert self.weight.dim() == 2 and self.weight.numel() == 16 and self.weight.is_contiguous()
            return x @ self.weight

    assert survey(Sized(), rows(3, 4)).reasons == {}


def test_a_first_state_of_zeros_stands_as_the_other_steps_do() -> None:
    class Frames(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            flat, state = x.flatten(0, 1), None
            for step in flat.unbind(1):
                state = self.cell(step, state)
            assert state is not None
            return state.unflatten(0, x.shape[:2]).flatten(1)

    found = survey(Frames(), rows(4, 2, 3, 3))
    assert found.reasons == {} and {use.layout for use in found.uses} == {Layout.FLAT}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch, as its compiler is loaded
def test_a_compiled_network_is_surveyed_inside() -> None:
    network = nn.Linear(4, 3)
    compiled = torch.compile(network)
    found = survey(compiled, rows(3, 4))  # pyright: ignore[reportArgumentType]
    assert found.reasons == {}
    assert [use.form for use in found.uses] == [use.form for use in survey(network, rows(3, 4)).uses]


def test_scripted_modules_have_a_reason() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        network = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 3)))
    found = survey(network, rows(3, 4))
    assert found.reasons == {"1.weight": reasons.UNREAD, "1.bias": reasons.UNREAD}
