"""The survey of a network: how every parameter is used, where rows stand, and why a parameter is not covered."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import NetworkError
from .form import Form, Nodes
from .layout import Layout
from .record import Call, Record

#: Weight, bias, and which of their equal parts: what the calls of one use have in common.
CallKey = tuple[str | None, str | None, int, int]


@dataclass(frozen=True)
class Use:
    """One place where a network uses a weight, a bias, or both.

    Attributes:
        weight: the user's name of the weight; None where the weight is no parameter.
        bias: likewise of the bias.
        form: how the outputs depend on them.
        function: the torch function that uses them.
        layout: where its inputs and outputs hold the rows.
        part: which of the weight's equal parts along its first axis.
        parts: how many there are.
        bias_part: likewise of the bias.
        bias_parts: likewise.
        index: which of the function calls that use them, where these differ; None where all are alike.
        calls: how many there were.
        steps: whether one function call uses them several times, as recurrent layers do.
        reads_input: whether it reads the network's own inputs, untouched but for views, or what the first matrix reads.
        size: numbers in its inputs per row, of all calls.
    """

    weight: str | None
    bias: str | None
    form: Form
    function: str
    layout: Layout
    part: int = 0
    parts: int = 1
    bias_part: int = 0
    bias_parts: int = 1
    index: int | None = None
    calls: int = 1
    steps: bool = False
    reads_input: bool = False
    size: float = 0.0

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of factors on the input nodes; those of a packed weight stand part by part, [parts, nodes]."""
        return self._shape(self._nodes.input_nodes)

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Likewise on the output nodes."""
        return self._shape(self._nodes.output_nodes)

    @property
    def views(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """The shapes in which the whole weight, the input nodes' factors and the output nodes' meet."""
        form = self._nodes
        views = form.view, form.input_view, form.output_view
        return views if self.parts == 1 else tuple((self.parts, *view) for view in views)  # pyright: ignore

    @property
    def _nodes(self) -> Nodes:
        assert isinstance(self.form, Nodes)
        return self.form

    def _shape(self, nodes: int) -> tuple[int, ...]:
        return (nodes,) if self.parts == 1 else (self.parts, nodes)

    def to_json(self) -> dict[str, Any]:
        """Plain values, for storage."""
        return {**asdict(self), "form": self.form.to_json(), "layout": self.layout.value}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Use":
        """The use behind `to_json`."""
        return cls(**{**values, "form": Form.from_json(values["form"]), "layout": Layout(values["layout"])})


@dataclass(frozen=True)
class Survey:
    """What a dry run learned about a network.

    Attributes:
        uses: every place that uses a parameter by a rule, in the order of the first calls.
        reasons: why the rows' own gradients cannot be told for the other parameters, by name.
        last: the weight whose outputs are the network's own, or None.
        dropouts: layouts of the dropout layers that were called, by name.
    """

    uses: tuple[Use, ...]
    reasons: Mapping[str, str]
    last: str | None = None
    dropouts: Mapping[str, Layout] = field(default_factory=dict)
    _by_parameter: dict[str, list[Use]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        table: dict[str, list[Use]] = {}
        for use in self.uses:
            for name in (use.weight, use.bias):
                if name is not None:
                    table.setdefault(name, []).append(use)
        # Made at once: the lock of a cached property cannot be traced by an export.
        object.__setattr__(self, "_by_parameter", table)

    def of(self, parameter: str) -> list[Use]:
        """The uses of a parameter, as weight or as bias."""
        return self._by_parameter.get(parameter, [])

    def layout_of(self, record: Record, call: Call) -> Layout:
        """Where a call of a recorded pass holds the rows.

        Raises:
            NetworkError: where the network uses the parameter otherwise than in the dry run.
        """

        def index() -> int:
            alike = (other for other in record.uses[call.places[0]] if call_key(other) == call_key(call))
            return len({other.number for other in alike}) - 1

        layout = self.layout(call.form, call_key(call), index)
        if layout is None:
            raise NetworkError(
                f"the network must use {call.weight or call.bias!r} as it did on the rows it was surveyed with, but "
                f"{call.function} now uses it in another way; fit with rows like those you predict, or predict with "
                "draws of weights"
            )
        return layout

    def layout(self, form: Form, key: CallKey, index: Callable[[], int]) -> Layout | None:
        """Where a use holds the rows; None where the dry run saw no such use.

        Args:
            form: of the use.
            key: what it uses. A pass that watches fewer parameters sees only one of weight and bias.
            index: tells which of the function calls that use them this is, where these differ.
        """
        weight, bias, part, bias_part = key
        options = [
            use
            for use in self.of(weight or bias or "")
            if (weight is None or (use.weight, use.part) == (weight, part))
            and (bias is None or (use.bias, use.bias_part) == (bias, bias_part))
            and use.form.signature == form.signature
        ]
        if len({use.layout for use in options}) > 1:
            number = index()
            options = [use for use in options if use.index == number]
        return options[0].layout if options else None

    def to_json(self) -> dict[str, Any]:
        """Plain values, for storage."""
        return {
            "uses": [use.to_json() for use in self.uses],
            "reasons": dict(self.reasons),
            "last": self.last,
            "dropouts": {name: layout.value for name, layout in self.dropouts.items()},
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Survey":
        """The survey behind `to_json`."""
        dropouts = {name: Layout(layout) for name, layout in values["dropouts"].items()}
        uses = tuple(Use.from_json(use) for use in values["uses"])
        return cls(uses, values["reasons"], values["last"], dropouts)


def call_key(call: Call) -> CallKey:
    """What the calls of one use have in common."""
    return call.weight, call.bias, call.part, call.bias_part
