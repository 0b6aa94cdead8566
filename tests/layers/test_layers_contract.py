"""The layer contract: every row of `layers_contract.py` passes every check, or says why a check does not apply."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from layers_contract import ROWS, Network, names_of, network_of, normal, rows_for
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from dubito.layers import Context, Form, Layout, Product, Survey, Use, survey
from dubito.layers.declared import bias_names, shared_weights, weights_with_nodes
from dubito.layers.factors import Factor, Factors, NodeFactors, fold
from dubito.layers.grams import mirrored
from dubito.layers.module import PassModule
from dubito.layers.passes import asking
from dubito.layers.record import BlockPart, Record, recorded
from dubito.layers.stack import Stack
from dubito.weight_normals.kernels import SMALLEST
from dubito.weight_normals.noise import LocalNoise
from dubito.weight_normals.placement import assign_noise
from dubito.weight_normals.scales import FormedScale
from dubito.weight_normals.streams import RowStreams

COUNT = 4  # rows of a batch
DRAWS = 3
PASSES = 2

CHECKS = ("kronecker", "factors", "moments", "late", "traced", "compiled")
PLACES = [(name, layout) for name in ROWS for layout in (Layout.ROWS, *ROWS[name].layouts)]
pytestmark = pytest.mark.filterwarnings(
    "ignore:LSTM with projections is not supported with oneDNN:UserWarning",
    "ignore:Using padding='same' with even kernel:UserWarning",
)


def places(*checks: str) -> pytest.MarkDecorator:
    """The rows in all their layouts, but for rows to which a check does not apply."""
    chosen = [(name, layout) for name, layout in PLACES if not set(checks) & set(ROWS[name].without)]
    return pytest.mark.parametrize(
        ("name", "layout"), chosen, ids=[f"{name}-{layout.value}" for name, layout in chosen]
    )


def rows(check: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", rows_for(check))


def near(value: Tensor, truth: Tensor, tolerance: float = 1e-12) -> None:
    """Equal but for rounding, in relation to the largest number of the truth."""
    assert value.shape == truth.shape
    assert (value - truth).abs().max() <= tolerance * truth.abs().max(), (value - truth).abs().max()


def case(name: str, layout: Layout, count: int = COUNT) -> tuple[Network, Tensor, Survey]:
    network, inputs = network_of(name, layout), ROWS[name].arranged(count, layout)
    return network, inputs, survey(network, inputs)


def alone(network: nn.Module, inputs: Tensor, row: int, tensors: dict[str, Tensor] | None = None) -> Tensor:
    """One row's outputs, by PyTorch alone."""
    return functional_call(network, tensors or {}, (inputs[row : row + 1],))


def drawn(network: nn.Module, draws: int, seed: int = 5) -> dict[str, Tensor]:
    """Parameters [S, ...], by name."""
    return {
        name: p.detach() + 0.2 * normal(draws, *p.shape, seed=seed + number)
        for number, (name, p) in enumerate(network.named_parameters())
    }


# -- what is declared --------------------------------------------------------------------------------------------


def test_rows_name_known_checks_and_say_why_they_do_not_apply() -> None:
    for row in ROWS.values():
        assert set(row.without) <= set(CHECKS)
        assert all(len(why.split()) > 3 for why in row.without.values())


@places()
def test_every_parameter_is_covered(name: str, layout: Layout) -> None:
    network, _, surveyed = case(name, layout)
    assert surveyed.reasons == ROWS[name].reasons
    assert ROWS[name].function in {use.function for use in surveyed.uses}
    for parameter in set(names_of(network)) - set(surveyed.reasons):
        assert surveyed.of(parameter), parameter
    if layout is not Layout.ROWS:
        assert {use.layout for use in surveyed.uses} == {layout}


@pytest.mark.parametrize("name", ROWS)
def test_surveys_are_stored_whole(name: str) -> None:
    _, _, surveyed = case(name, Layout.ROWS)
    assert Survey.from_json(surveyed.to_json()) == surveyed


# -- passes ------------------------------------------------------------------------------------------------------


@places()
def test_outputs_are_pytorchs(name: str, layout: Layout) -> None:
    network, inputs, surveyed = case(name, layout)
    with torch.no_grad():  # PyTorch's fast paths are on
        truth = network(inputs)
        with asking(network, Context(), names_of(network)) as shell:
            near(shell(inputs), truth)
        with recorded(network, names_of(network), Record(surveyed.layout_of)) as shell:
            near(shell(inputs), truth)


def record_of(network: nn.Module, inputs: Tensor, surveyed: Survey) -> Record:
    record = Record(surveyed.layout_of)
    with recorded(network, names_of(network), record) as shell:
        shell(inputs).sin().sum().backward()
    return record


def row_gradients(record: Record, parameter: str, count: int) -> Tensor:
    """Each row's gradient, [B, numbers], from recorded calls."""
    parts = sorted(part for part in record.uses if part[0] == parameter)
    gradients = [
        BlockPart(parameter, None, None, part).gradients(record.of((parameter, part)), count, slice(None))
        for _, part in parts
    ]
    return torch.cat(gradients, 1)


@places()
def test_gradients_of_rows_are_autograds(name: str, layout: Layout) -> None:
    network, inputs, surveyed = case(name, layout)
    record = record_of(network, inputs, surveyed)
    covered = {key: p for key, p in network.named_parameters() if key not in surveyed.reasons}
    truth: dict[str, list[Tensor]] = {key: [] for key in covered}
    for row in range(COUNT):
        loss = alone(network, inputs, row).sin().sum()
        for key, gradient in zip(covered, torch.autograd.grad(loss, list(covered.values())), strict=True):
            truth[key].append(gradient.flatten())
    scale = max(float(torch.stack(each).abs().max()) for each in truth.values())
    for key, expected in truth.items():
        gradients, expected = row_gradients(record, key, COUNT), torch.stack(expected)
        # A gradient that is zero but for rounding (a key's bias) is judged beside the others.
        assert (gradients - expected).abs().max() <= 1e-12 * max(float(expected.abs().max()), 1e-3 * scale), key


@places()
def test_products_of_matrices_are_gradients(name: str, layout: Layout) -> None:
    network, inputs, surveyed = case(name, layout)
    record = record_of(network, inputs, surveyed)
    for (parameter, part), calls in record.uses.items():
        form = calls[0].form
        alike = all(call.weight == parameter and call.form.signature == form.signature for call in calls)
        if alike and isinstance(form, Product):
            block = BlockPart(parameter, None, form, part)
            reached = record.of((parameter, part))
            a, g = block.matrices(reached, COUNT, slice(1, 3))
            products = g @ a if form.order is None else (g @ a)[..., form.order.argsort()]
            truth = block.gradients(reached, COUNT, slice(1, 3))
            near(form.tensor(products).flatten(1), truth)


# -- Kronecker factors -------------------------------------------------------------------------------------------


@places("kronecker")
def test_moments_of_inputs_and_gradients_are_sums_over_positions(name: str, layout: Layout) -> None:
    """Where y = W a at every position, ∂y_m / ∂W_m = a: autograd shows the patches without any code of ours."""
    network, inputs, surveyed = case(name, layout)
    (key, weight) = next((k, p) for k, p in network.named_parameters() if p.ndim > 1)
    captured: list[Tensor] = []
    handle = network.layer.register_forward_hook(lambda _, args, output: captured.extend((args[0], output)))
    try:
        outputs = network(inputs)
    finally:
        handle.remove()
    x, y = captured
    (g,) = torch.autograd.grad(outputs.sin().sum(), y)

    def layer(value: Tensor) -> Tensor:
        return functional_call(network.layer, {key.removeprefix("layer."): value}, (x,))

    trailing = weight.ndim == 2
    groups = getattr(network.layer, "groups", 1)
    channels = y.shape[-1] if trailing else y.shape[1]
    jacobian = jacrev(layer)(weight.detach())  # [*outputs, *weight]
    assert isinstance(jacobian, Tensor)
    jacobian = jacobian.movedim(y.ndim - 1 if trailing else 1, 0)  # output channels first
    # Sum over the weight's axis of outputs, along which only the channel's own entries are not zero.
    patches = jacobian.sum(y.ndim + (0 if weight.shape[0] == channels else 1)).reshape(
        channels, y.numel() // channels, -1
    )
    first = patches.reshape(groups, channels // groups, *patches.shape[1:])[:, 0]  # one channel of each group
    errors = g.movedim(-1 if trailing else 1, 0).reshape(groups, channels // groups, -1)
    truth_a, truth_g = first.mT @ first, errors @ errors.mT

    record = record_of(network, inputs, surveyed)
    (call,) = record.of((key, 0))
    form = call.form
    assert isinstance(form, Product)
    order = torch.arange(form.columns) if form.order is None else form.order.argsort()
    a, b = BlockPart(key, None, form).matrices([call], COUNT, slice(None))
    near((a.mT @ a).sum(0)[:, order][:, :, order], truth_a)
    near((b @ b.mT).sum(0), truth_g)
    sums = torch.zeros(form.groups, form.columns, form.columns, dtype=torch.float64)
    form.add_moment(sums, call.inputs)
    near(mirrored(sums)[:, order][:, :, order], truth_a)
    near(form.total(call.inputs)[:, order], first.sum(1))


# -- stacked draws -----------------------------------------------------------------------------------------------


@places()
def test_stacked_draws_are_a_loop(name: str, layout: Layout) -> None:
    network, inputs, surveyed = case(name, layout)
    tensors = drawn(network, DRAWS)
    truth = torch.cat(
        [functional_call(network, {key: t[draw] for key, t in tensors.items()}, (inputs,)) for draw in range(DRAWS)]
    )
    stack = Stack(tensors, surveyed, draws=DRAWS, rows=COUNT)
    late = stack.parts_late
    assert late is not bool({use.layout for use in surveyed.uses} & {Layout.FLAT, Layout.FLAT_SECOND})
    repeated = inputs.repeat(DRAWS, *(1 for _ in inputs.shape[1:]))
    for tiled, given in ([(False, inputs)] if late and "late" not in ROWS[name].without else []) + [(True, repeated)]:
        stack = Stack(tensors, surveyed, draws=DRAWS, rows=COUNT, repeated=tiled)
        with asking(network, stack, stack.names) as shell:
            near(shell(given), truth)
    some = {key: t for number, (key, t) in enumerate(tensors.items()) if number % 2 == 0}
    truth = torch.cat(
        [functional_call(network, {key: t[draw] for key, t in some.items()}, (inputs,)) for draw in range(DRAWS)]
    )
    stack = Stack(some, surveyed, draws=DRAWS, rows=COUNT, repeated=True)
    with asking(network, stack, stack.names) as shell:
        near(shell(repeated), truth)


@pytest.mark.parametrize("name", ROWS)
def test_gradients_of_stacked_draws_are_autograds(name: str) -> None:
    network, inputs, surveyed = case(name, Layout.ROWS)
    tensors = {key: t.requires_grad_() for key, t in drawn(network, DRAWS).items()}
    losses = [
        functional_call(network, {key: t[draw] for key, t in tensors.items()}, (inputs,)).sin().sum()
        for draw in range(DRAWS)
    ]
    truth = torch.autograd.grad(torch.stack(losses).sum(), list(tensors.values()))
    stack = Stack(tensors, surveyed, draws=DRAWS, rows=COUNT, repeated=True)
    with asking(network, stack, stack.names) as shell:
        loss = shell(inputs.repeat(DRAWS, *(1 for _ in inputs.shape[1:]))).sin().sum()
        gradients = torch.autograd.grad(loss, list(tensors.values()))
    scale = max(float(each.abs().max()) for each in truth)
    for gradient, expected in zip(gradients, truth, strict=True):
        assert (gradient - expected).abs().max() <= 1e-12 * scale


# -- factors on nodes --------------------------------------------------------------------------------------------


def explicit(use: Use, weight: Tensor, s: Tensor, r: Tensor) -> Tensor:
    """W ∘ r sᵀ written out."""
    view, inputs, outputs = use.views
    return (weight.reshape(view) * s.reshape(inputs) * r.reshape(outputs)).reshape(weight.shape)


def laws(uses: dict[str, Use], passes: int) -> dict[str, dict[str, Tensor]]:
    """Means and deviations [P, nodes] of the factors on both sides, and the noise [B, nodes] of the rows."""
    values: dict[str, dict[str, Tensor]] = {}
    for seed, (key, use) in enumerate(uses.items()):
        values[key] = {}
        for side, nodes in (("in", use.input_shape), ("out", use.output_shape)):
            mean, std, noise = (
                normal(*n, *nodes, seed=10 * seed + i) for i, n in enumerate(((passes,), (passes,), (COUNT,)))
            )
            values[key] |= {
                f"{side} mean": 1 + 0.3 * mean, f"{side} std": 0.3 * std, f"{side} noise": noise + len(side),
            }  # fmt: skip
    return values


def factors_of(law: dict[str, Tensor], *, noisy: bool) -> NodeFactors:
    return NodeFactors(
        *(
            Factor(law[f"{side} mean"], law[f"{side} std"] if noisy else None, law[f"{side} noise"] if noisy else None)
            for side in ("in", "out")
        )
    )


def explicit_outputs(
    network: nn.Module,
    inputs: Tensor,
    uses: dict[str, Use],
    law: dict[str, dict[str, Tensor]],
    biases: dict[str, Tensor],
    number: int,
    *,
    noisy: bool,
) -> Tensor:
    """Row by row, with that row's factors in the weights and the biases of a pass, by PyTorch alone."""
    named, outputs = dict(network.named_parameters()), []
    for row in range(COUNT):
        tensors = {key: values[number] for key, values in biases.items()}
        for key, use in uses.items():
            s, r = (
                law[key][f"{side} mean"][number]
                + (law[key][f"{side} std"][number] * law[key][f"{side} noise"][row] if noisy else 0)
                for side in ("in", "out")
            )
            tensors[key] = explicit(use, named[key], s, r)
        outputs.append(alone(network, inputs, row, tensors))
    return torch.cat(outputs)


@places("factors")
def test_factors_are_in_the_weights(name: str, layout: Layout) -> None:
    network, inputs, surveyed = case(name, layout)
    uses = weights_with_nodes(network, surveyed)
    assert set(uses) == {key for key, p in network.named_parameters() if p.ndim > 1}
    by_row = [key for key in uses if key not in shared_weights(uses, surveyed)]
    # Factors stand beside rows on an axis of their own, or before the positions that share one with them.
    assert bool(by_row) is (layout in (Layout.ROWS, Layout.FLAT)) or "tied" in name
    uses = {key: uses[key] for key in by_row}
    law = laws(uses, PASSES)
    biases = {
        key: p.detach() + 0.1 * normal(PASSES, *p.shape, seed=len(key))
        for key, p in network.named_parameters()
        if key in bias_names(network, by_row, surveyed)
    }
    repeated = inputs.repeat(PASSES, *(1 for _ in inputs.shape[1:]))
    for noisy in (True, False):  # factors per row, and per draw
        truth = torch.cat(
            [explicit_outputs(network, inputs, uses, law, biases, number, noisy=noisy) for number in range(PASSES)]
        )
        factors = {key: factors_of(law[key], noisy=noisy) for key in uses}
        context = Factors(factors, biases, passes=PASSES, rows=COUNT)
        with asking(network, context, context.names) as shell:
            near(shell(repeated), truth)


@places("factors")
def test_folded_factors_are_those_of_rows(name: str, layout: Layout) -> None:
    network, inputs, surveyed = case(name, layout)
    uses = weights_with_nodes(network, surveyed)
    law = laws(uses, 1)
    truth = explicit_outputs(network, inputs, uses, law, {}, 0, noisy=False)
    named = dict(network.named_parameters())
    folded = {key: fold(use, named[key], factors_of(law[key], noisy=False)) for key, use in uses.items()}
    near(functional_call(network, folded, (inputs,)), truth)


@pytest.mark.parametrize("name", rows_for("factors"))
def test_gradients_through_factors_are_autograds(name: str) -> None:
    network, inputs, surveyed = case(name, Layout.ROWS)
    uses = weights_with_nodes(network, surveyed)
    uses = {key: use for key, use in uses.items() if key not in shared_weights(uses, surveyed)}
    law = laws(uses, 1)
    leaves = [v.requires_grad_() for values in law.values() for key, v in values.items() if "noise" not in key]
    leaves += [p for key, p in network.named_parameters()]
    truth = torch.autograd.grad(explicit_outputs(network, inputs, uses, law, {}, 0, noisy=True).sin().sum(), leaves)
    context = Factors({key: factors_of(law[key], noisy=True) for key in uses}, passes=1, rows=COUNT)
    with asking(network, context, context.names) as shell:
        gradients = torch.autograd.grad(shell(inputs).sin().sum(), leaves)
    scale = max(float(each.abs().max()) for each in truth)
    for gradient, expected in zip(gradients, truth, strict=True):
        assert (gradient - expected).abs().max() <= 1e-12 * scale


# -- noise of weights on outputs ---------------------------------------------------------------------------------


class Constant(RowStreams):
    """Noise that is the same number everywhere: 0 shows the mean of outputs, 1 adds their deviation."""

    def __init__(self, value: float, rows: int) -> None:
        super().__init__(0, 0, rows)
        self.value = value

    def normal(self, path: tuple[int | str, ...], shape: tuple[int, ...], like: Tensor) -> Tensor:
        return like.new_full((self.rows, *shape), self.value)


def layer_outputs(network: Network, inputs: Tensor, context: Context, names: list[str]) -> Tensor:
    """What the layer of a network answers in a pass."""
    seen: list[Tensor] = []
    with torch.no_grad(), asking(network, context, names) as shell:
        handle = shell.layer.register_forward_hook(lambda _, __, output: seen.append(output.clone()))
        shell(inputs)
        handle.remove()
    return seen[0]


def noise_of(network: Network, surveyed: Survey, streams: RowStreams) -> LocalNoise:
    stds = {key: 0.1 + 0.2 * normal(*p.shape, seed=len(key)).abs() for key, p in network.named_parameters()}
    placement = assign_noise(surveyed, network, list(stds))
    assert set(placement.names) == set(stds)
    return LocalNoise(placement, lambda key: FormedScale(stds[key]), streams)


def closed_moments(network: Network, inputs: Tensor, noise: LocalNoise) -> tuple[Tensor, Tensor]:
    """Mean and variance of the layer's outputs: those of μ on x, and of σ² on x²."""
    seen: list[Tensor] = []
    handle = network.layer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    try:
        network(inputs)
    finally:
        handle.remove()
    variances = {key.removeprefix("layer."): noise.scales(key).std.square() for key, _ in network.named_parameters()}
    with torch.no_grad():
        return network.layer(seen[0]), functional_call(network.layer, variances, (seen[0].square(),))


@places("moments")
def test_moments_of_noise_are_closed_forms(name: str, layout: Layout) -> None:
    network, inputs, surveyed = case(name, layout)
    names = names_of(network)
    means = layer_outputs(network, inputs, noise_of(network, surveyed, Constant(0.0, COUNT)), names)
    above = layer_outputs(network, inputs, noise_of(network, surveyed, Constant(1.0, COUNT)), names)
    mean, variance = closed_moments(network, inputs, noise_of(network, surveyed, Constant(0.0, COUNT)))
    near(means, mean)
    near(above - means, (variance + SMALLEST).sqrt())  # which keeps its gradient finite where all inputs are zero


@pytest.mark.parametrize("name", rows_for("moments"))
def test_noise_has_these_moments(name: str) -> None:
    draws = 4000
    network, inputs, surveyed = case(name, Layout.ROWS)
    row = inputs[:1].expand(draws, *inputs.shape[1:]).contiguous()  # rows have noise of their own
    noise = noise_of(network, surveyed, RowStreams(3, 0, draws))
    sample = layer_outputs(network, row, noise, names_of(network)).reshape(draws, -1)
    mean, variance = (t.reshape(1, -1) for t in closed_moments(network, inputs[:1], noise))
    z = (sample.mean(0) - mean) / (variance / draws).sqrt()
    ratio = (sample.var(0) / variance - 1) / (2 / (draws - 1)) ** 0.5
    assert z.abs().max() < 5 and ratio.abs().max() < 5


# -- compiled and exported ---------------------------------------------------------------------------------------


def contexts(name: str, network: nn.Module, surveyed: Survey) -> dict[str, Context]:
    """Stacked draws on repeated inputs; and factors of draws where weights stand between nodes."""
    tensors = drawn(network, DRAWS)
    found: dict[str, Context] = {"stack": Stack(tensors, surveyed, draws=DRAWS, rows=COUNT, repeated=True)}
    if "factors" not in ROWS[name].without:
        uses = weights_with_nodes(network, surveyed)
        uses = {key: use for key, use in uses.items() if key not in shared_weights(uses, surveyed)}
        law = laws(uses, DRAWS)
        found["factors"] = Factors({key: factors_of(law[key], noisy=False) for key in uses}, passes=DRAWS, rows=COUNT)
    return found


def inputs_for(name: str, kind: str, count: int, seed: int) -> Tensor:
    """For factors, inputs of one pass where they may part late; else repeated ones."""
    inputs = ROWS[name].inputs(count, seed)
    return torch.cat([inputs] * DRAWS) if kind == "stack" or "late" in ROWS[name].without else inputs


def traced_rows() -> Iterator[tuple[str, str]]:
    """The first row of every function, with factors where it can carry them, else with stacked draws."""
    seen: set[str] = set()
    for name in rows_for("traced"):
        if ROWS[name].function not in seen:
            seen.add(ROWS[name].function)
            yield name, "stack" if {"factors", "late"} & set(ROWS[name].without) else "factors"
    yield from (("linear", "stack"), ("conv2d", "stack"), ("attention", "stack"), ("encoder", "stack"))


TRACED = list(traced_rows())
traced = pytest.mark.parametrize(("name", "kind"), TRACED, ids=["-".join(each) for each in TRACED])
# What PyTorch says while it traces: it looks through caches, lets a module be changed that is traced, as standins are
# put in place, and keeps the lists of recurrent layers.
quiet = pytest.mark.filterwarnings(
    "ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning",
    "ignore:While compiling, we found certain side effects:UserWarning",
    "ignore:The tensor attributes? self.shell:UserWarning",
    "ignore:A model attribute `shell:UserWarning",
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
)


def modules(name: str, kind: str) -> PassModule:
    network, _, surveyed = case(name, Layout.ROWS)
    context = contexts(name, network, surveyed)[kind]
    return PassModule(network, context, context.names)


by_dynamo = pytest.mark.skipif(
    torch.__version__ < (2, 13), reason="earlier dynamo cannot trace tensors of a subclass that are made in a pass"
)


@quiet
@by_dynamo
@traced
def test_compiled_passes_are_eager_ones(name: str, kind: str) -> None:
    if "compiled" in ROWS[name].without:
        pytest.skip(ROWS[name].without["compiled"])
    module = modules(name, kind)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    inputs = inputs_for(name, kind, COUNT, 0)
    with torch.no_grad():
        truth = module(inputs)
        near(compiled(inputs), truth)
        assert (truth - network_of(name)(inputs).repeat(len(truth) // len(inputs), 1)).abs().max() > 1e-2


@quiet
@pytest.mark.parametrize("strict", [pytest.param(True, marks=by_dynamo), False], ids=["strict", "not strict"])
@traced
def test_exported_passes_are_eager_ones_at_another_batch_size(name: str, kind: str, strict: bool) -> None:
    if kind == "stack" and torch.__version__ < (2, 13):
        pytest.skip("earlier exports lose the number of rows behind stacked draws")
    module = modules(name, kind)
    with torch.no_grad():
        inputs, others = inputs_for(name, kind, COUNT, 0), inputs_for(name, kind, COUNT + 3, 1)
        dynamic = (({0: torch.export.Dim.DYNAMIC},),)
        program = torch.export.export(module, (inputs,), strict=strict, dynamic_shapes=dynamic)
        near(program.module()(others), module(others))


class Doubled(Context):
    """Answers twice what the function answers."""

    def use(self, form: Form, x: Tensor, weight: Any, bias: Any = None, *, active: Any = None) -> Tensor:
        return 2 * super().use(form, x, weight, bias, active=active)


@quiet
@by_dynamo
def test_standins_are_made_anew_while_dynamo_traces() -> None:
    """Those that stood on a module before are read as plain tensors, without an error."""
    network, inputs, _ = case("linear", Layout.ROWS)
    with torch.no_grad():
        module = PassModule(network, Doubled(), names_of(network))
        truth = functional_call(network, {key: 2 * p for key, p in network.named_parameters()}, (inputs,))
        near(module(inputs), truth)
        near(torch.export.export(module, (inputs,), strict=True).module()(inputs), truth)
        module._fill = lambda: None  # type: ignore[method-assign]
        ignored = torch.export.export(module, (inputs,), strict=True).module()(inputs)
        near(ignored, network(inputs))  # once dynamo reads them, `_fill` need not run while it traces


# -- threads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROWS)
def test_two_threads_are_one(name: str) -> None:
    network = network_of(name)
    batches = [ROWS[name].inputs(COUNT, seed) for seed in range(6)]
    surveyed = survey(network, batches[0])

    def work(inputs: Tensor) -> list[Tensor]:
        record = record_of(network, inputs, surveyed)
        stack = Stack(drawn(network, 2), surveyed, draws=2, rows=COUNT, repeated=True)
        with torch.no_grad(), asking(network, stack, stack.names) as shell:
            outputs = shell(torch.cat([inputs, inputs]))
        return [outputs, *(row_gradients(record, key, COUNT) for key in names_of(network))]

    serial = [work(inputs) for inputs in batches]
    before = {key: t.clone() for key, t in network.state_dict().items()}
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        with ThreadPoolExecutor(2) as pool:
            results = list(pool.map(work, batches))
    finally:
        sys.setswitchinterval(interval)
    for result, truth in zip(results, serial, strict=True):
        assert all(map(torch.equal, result, truth))
    assert all(torch.equal(t, before[key]) for key, t in network.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in network.modules())
