"""The dry run behind a survey.

The network runs in evaluation mode on three rows and on the first of them alone; then the gradients that the recorded
calls give for the first row are compared with autograd's, so that a parameter which is also used elsewhere, or where
rows touch each other, is left out and not got wrong.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from .. import seeds
from ..inputs import Inputs, call, count_rows, map_tensors, named_tensors, take
from . import reasons
from .form import Nodes
from .kinds import Standin
from .layout import Layout, candidates, decided
from .linear import Pairwise
from .record import BlockPart, Call, Part, Record, recorded
from .sharded import whole_tensors
from .shell import leased, seeded
from .tree import is_shared
from .uses import Survey, Use, call_key


def survey(network: nn.Module, inputs: Inputs, names: Collection[str] | None = None) -> Survey:
    """Survey a network by a dry run on a few rows.

    Args:
        network: in evaluation mode; it is left as it is.
        inputs: some rows, of which up to three are run.
        names: the parameters of interest; None takes all that are floating-point.
    """
    # A shared base has no distribution, and its gradients would be as large as it is.
    named = {n: p for n, p in network.named_parameters() if p.is_floating_point() and not is_shared(p)}
    names = list(named) if names is None else [name for name in named if name in set(names)]
    scripted = _scripted(network)
    watched = [name for name in names if name not in scripted]
    rows = min(3, count_rows(inputs))
    few = take(inputs, slice(rows)) if rows > 1 else map_tensors(lambda t: torch.cat([t, t]), inputs)
    few, rows = map_tensors(Tensor.detach, few), max(rows, 2)
    many = _Trial()
    outputs = _run(network, few, watched, many)
    single = _Trial()
    with torch.no_grad():
        _run(network, take(few, slice(1)), watched, single)
    uses = _uses(many, single, rows, few, whole=not any(map(is_shared, network.parameters())))
    unknown = _unknown(names, uses, many)
    unknown |= _misread(network, few, [n for n in watched if n not in unknown], uses, outputs)
    dropouts = {
        name: decided(candidates(tensor, single.dropouts[name], rows))
        for name, tensor in many.dropouts.items()
        if name in single.dropouts
    }
    ordered = {name: unknown[name] for name in names if name in unknown}
    return Survey(tuple(uses), ordered, _last(many, outputs), dropouts)


def _unknown(names: list[str], uses: list[Use], many: "_Trial") -> dict[str, str]:
    """Why the rows' own gradients cannot be told for some parameters, as far as the uses say."""
    unknown = {name: many.unread[name] for name in names if name in many.unread}
    uses_of: dict[str, list[Use]] = {}
    for use in uses:
        reason = reasons.of_layout(use.form, use.layout)
        for name in (use.weight, use.bias):
            if name is not None:
                uses_of.setdefault(name, []).append(use)
                if reason is not None:
                    unknown.setdefault(name, reason)
    for name in names:
        parts = {use.parts if name == use.weight else use.bias_parts for use in uses_of.get(name, ())}
        if name not in unknown and not parts:
            unknown[name] = reasons.unread(name)
        elif len(parts) > 1:
            unknown.setdefault(name, reasons.PARTS)
    return unknown


# -- the dry run -------------------------------------------------------------------------------------------------


class _Trial(Record):
    """A pass that also keeps outputs, functions without a rule, and what dropout layers read."""

    def __init__(self) -> None:
        super().__init__()
        self.unread: dict[str, str] = {}
        self.outputs: list[tuple[Call, Tensor]] = []
        self.dropouts: dict[str, Tensor] = {}

    def seen(self, call: Call, output: Tensor) -> None:
        if output.ndim == 2:
            self.outputs.append((call, output.detach().clone()))  # later operations may change it in place

    def without_rule(self, function: Any, standins: Sequence[Standin], reason: str | None) -> None:
        for standin in standins:
            self.unread.setdefault(standin.parameter, reason or reasons.no_rule(standin.parameter, function))


def _run(network: nn.Module, inputs: Inputs, names: list[str], trial: _Trial) -> Tensor:
    """Outputs of a recorded pass."""
    with recorded(network, names, trial) as shell, _watched_dropouts(shell, trial), seeded(network, 0, "survey"):
        return call(shell, inputs).detach()


@contextmanager
def _watched_dropouts(shell: nn.Module, trial: _Trial) -> Iterator[None]:
    handles = []

    def hook(name: str):
        def keep(_: nn.Module, args: tuple[Any, ...]) -> None:
            if args:
                trial.dropouts.setdefault(name, args[0].detach())

        return keep

    try:
        for name, module in shell.named_modules():
            if isinstance(module, _DropoutNd):
                handles.append(module.register_forward_pre_hook(hook(name)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _scripted(network: nn.Module) -> set[str]:
    """Parameters of scripted modules, whose code calls no torch function that Python sees."""
    return {
        f"{path}.{name}" if path else name
        for path, module in network.named_modules()
        if isinstance(module, torch.jit.ScriptModule)
        for name, _ in module.named_parameters()
    }


def _groups(trial: _Trial) -> dict[Any, list[list[Call]]]:
    """The calls by what they use; those of one torch function call together."""
    groups: dict[Any, dict[int, list[Call]]] = {}
    for seen in trial.calls:
        groups.setdefault(call_key(seen), {}).setdefault(seen.number, []).append(seen)
    return {key: list(numbers.values()) for key, numbers in groups.items()}


def _uses(many: _Trial, single: _Trial, rows: int, inputs: Inputs, whole: bool) -> list[Use]:
    of_one_row = _groups(single)
    storages = {tensor.untyped_storage().data_ptr() for _, tensor in named_tensors(inputs)}
    first = next((seen for seen in many.calls if isinstance(seen.form, Nodes | Pairwise)), None)
    if first is not None and whole:  # inputs that the network only prepared, not what a base made of them
        storages.add(first.inputs.untyped_storage().data_ptr())
    uses = []
    for key, groups in _groups(many).items():
        alone = of_one_row.get(key, [])
        paired = zip(groups, alone if len(alone) == len(groups) else [[] for _ in groups], strict=True)
        pairs = list(paired)
        layouts = _layouts([_candidates(group, other, rows) for group, other in pairs])
        different = [_use(group, layout, rows, storages) for (group, _), layout in zip(pairs, layouts, strict=True)]
        alike = {(use.form, use.layout) for use in different}
        if len(alike) == 1:
            size = sum(use.size for use in different)
            reading = any(use.reads_input for use in different)
            uses.append(replace(different[0], calls=len(different), size=size, reads_input=reading))
        else:
            uses += [replace(use, index=index) for index, use in enumerate(different)]
    return uses


def _use(group: list[Call], layout: Layout, rows: int, storages: set[int]) -> Use:
    """One torch function's use, from its calls in the run of several rows."""
    first = group[0]
    return Use(
        first.weight,
        first.bias,
        first.form,
        first.function,
        layout,
        first.part,
        first.parts,
        first.bias_part,
        first.bias_parts,
        steps=len(group) > 1,
        reads_input=any(seen.inputs.untyped_storage().data_ptr() in storages for seen in group),
        size=sum(seen.inputs.numel() for seen in group) / rows,
    )


def _candidates(group: list[Call], alone: list[Call], rows: int) -> set[Layout]:
    """The layouts that a function call in the run of several rows may have, beside its like in that of one row."""
    if any(seen.active is not None for seen in group):  # sequences of different lengths, one for each row
        lengths = {len(seen.inputs) for seen in group}, {len(seen.inputs) for seen in alone}
        return {Layout.ROWS} if lengths == ({rows}, {1}) else set()
    if len(group) != len(alone):
        return set()
    pairs = zip(group, alone, strict=True)
    return set.intersection(*(candidates(seen.inputs, other.inputs, rows) for seen, other in pairs))


def _layouts(possible: list[set[Layout]]) -> list[Layout]:
    """Of several calls: one whose values repeat (a first state of zeros) stands as the others do."""
    common = set.intersection(*possible)
    return [decided(layouts & common or layouts) for layouts in possible]


def _last(many: _Trial, outputs: Tensor) -> str | None:
    """The weight whose outputs [B, m] are the network's, but for an axis of size 1."""
    for seen, answer in many.outputs:
        if answer.numel() == outputs.numel() and torch.equal(answer.reshape_as(outputs), outputs):
            return seen.weight
    return None


# -- gradients against autograd's --------------------------------------------------------------------------------


def _misread(network: nn.Module, inputs: Inputs, names: list[str], uses: list[Use], outputs: Tensor) -> dict[str, str]:
    """Why some parameters' gradients for the first row are not what recorded calls rebuild of them."""
    rows = count_rows(inputs)
    noise = torch.randn(
        outputs.shape, generator=seeds.generator(0, "survey", device=outputs.device), dtype=outputs.dtype,
        device=outputs.device,
    )  # fmt: skip
    noise[1:] = 0  # the first row alone
    expected = _autograd(network, inputs, names, noise)
    record = Record(Survey(tuple(uses), {}).layout_of)
    with torch.enable_grad(), recorded(network, names, record) as shell, seeded(network, 0, "survey"):
        answer = call(shell, inputs)
        if answer.requires_grad:
            answer.backward(noise)
    scale = max((float(g.norm()) for g in expected.values() if g is not None), default=0.0)
    wrong = {}
    with torch.no_grad():
        for name in names:
            parts = [part for part in record.uses if part[0] == name]
            if not any(record.of(part) for part in parts):
                wrong[name] = reasons.UNREACHED
            elif not _agrees(record, name, parts, expected[name], rows, scale):
                wrong[name] = reasons.MISREAD
    return wrong


def _autograd(network: nn.Module, inputs: Inputs, names: list[str], noise: Tensor) -> dict[str, Tensor | None]:
    """The gradients of the first row's outputs, by parameter."""
    named = dict(network.named_parameters()) | whole_tensors(network)
    leaves = {name: named[name].detach().requires_grad_() for name in names}
    # cuDNN's recurrent layers have no backward pass in evaluation mode; its switch is one of the whole process.
    without_cudnn = torch.backends.cudnn.flags(enabled=False) if noise.is_cuda else nullcontext()
    with (
        torch.enable_grad(),
        without_cudnn,
        leased(network, leaves, detached=True) as shell,
        seeded(network, 0, "survey"),
    ):
        outputs = call(shell, inputs)
        if outputs.requires_grad:
            outputs.backward(noise)  # not autograd.grad, which reentrant checkpointing refuses
    return {name: leaf.grad for name, leaf in leaves.items()}


def _agrees(record: Record, name: str, parts: list[Part], truth: Tensor | None, rows: int, scale: float) -> bool:
    rebuilt = [
        BlockPart(name, None, None, part).gradients(record.of((name, part)), rows, slice(0, 1)).flatten()
        for _, part in sorted(parts)
        if record.of((name, part))
    ]
    gradient = torch.cat(rebuilt)
    truth = torch.zeros_like(gradient) if truth is None else truth.flatten()
    if gradient.shape != truth.shape:  # no gradient reaches one of its parts
        return False
    eps = torch.finfo(truth.dtype).eps
    # Two ways to the same gradient differ by rounding; a missed use of the parameter is no rounding. Some
    # gradients are zero but for rounding (an attention's key bias), so the largest of all sets the scale too.
    return float((gradient - truth).norm()) <= 3 * eps**0.5 * float(truth.norm()) + 100 * eps * scale
