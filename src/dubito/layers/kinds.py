"""Kinds of layers: which torch functions use a parameter by a rule, and the tensors that notice it.

A kind is a reader of a torch function, with the function's signature. It says what the function does with its
parameters by calling `at.use(form, input, weight, bias)`; what a pass makes of that is up to its context.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from .context import Context
    from .form import Form

Reader = TypeVar("Reader", bound=Callable[..., Any])

#: The readers by their torch functions.
READERS: dict[Callable[..., Any], Callable[..., Any]] = {}


class Declared(NamedTuple):
    """What the forward pass of a module class does with one of its weights.

    Attributes:
        weight: the attribute that holds it.
        bias: likewise of the bias that is added to its product, or None.
        form: how the outputs depend on them.
        function: the torch function that uses them.
        parts: how many equal parts the weight is cut in.
    """

    weight: str
    bias: str | None
    form: "Form"
    function: str
    parts: int = 1


#: What PyTorch's own module classes do with their weights.
DECLARATIONS: dict[type[nn.Module], Callable[[Any], Iterable[Declared]]] = {}


def declares(*classes: type[nn.Module]) -> Callable[[Reader], Reader]:
    """Register what modules of these classes do with their weights, which is then known before any row comes."""

    def register(reader: Reader) -> Reader:
        DECLARATIONS.update(dict.fromkeys(classes, reader))
        return reader

    return register


class NoRule(Exception):
    """Raised by a reader, or by a use, for arguments it has no rule for: the function then runs as it is."""


def kind(*functions: Callable[..., Any]) -> Callable[[Reader], Reader]:
    """Register a reader for torch functions: `reader(at, *arguments)` with the function's own signature.

    The reader returns the function's answer, made by `at.use(form, input, weight, bias)` wherever a parameter is used,
    or NotImplemented where it has no rule for these arguments.

    Args:
        functions: as users call them, such as `torch.nn.functional.linear`.
    """

    def register(reader: Reader) -> Reader:
        READERS.update(dict.fromkeys(functions, reader))
        return reader

    return register


class Standin(Tensor):
    """A parameter in a slot of a private shell that asks the pass's context what to do.

    Only functions that touch it reach Python; all others run at full speed.

    Attributes:
        parameter: the user's name of it.
        value: the tensor it stands for.
        context: what the pass does.
        part: which of `parts` equal parts along the parameter's first axis this is.
        parts: how many there are.
        turned: whether this is the parameter transposed.
    """

    parameter: str
    value: Tensor
    context: "Context"
    part: int
    parts: int
    turned: bool

    @staticmethod
    def of(value: Tensor, name: str, context: "Context") -> "Standin":
        """A standin for a whole parameter."""
        return Standin._view(value, name, context, 0, 1, False)

    @staticmethod
    def _view(value: Tensor, name: str, context: "Context", part: int, parts: int, turned: bool) -> "Standin":
        standin = value.as_subclass(Standin) if is_dynamo_compiling() else _bare(value)
        standin.parameter, standin.value, standin.context = name, value, context
        standin.part, standin.parts, standin.turned = part, parts, turned
        return standin

    def chunked(self, parts: int) -> list["Standin"]:
        """Standins of the equal parts along the first axis."""
        if self.parts > 1 or self.turned:
            raise NoRule("a part of it is cut again")
        values = enumerate(self.value.chunk(parts))
        return [Standin._view(value, self.parameter, self.context, part, parts, False) for part, value in values]

    def transposed(self) -> "Standin":
        """A standin of the matrix turned."""
        return Standin._view(
            self.value.transpose(-1, -2), self.parameter, self.context, self.part, self.parts, not self.turned
        )

    # What Python code asks of a weight without using its numbers.
    shape = property(lambda self: self.value.shape)  # pyright: ignore[reportAssignmentType]
    dtype = property(lambda self: self.value.dtype)  # pyright: ignore[reportAssignmentType]
    device = property(lambda self: self.value.device)  # pyright: ignore[reportAssignmentType]
    ndim = property(lambda self: self.value.ndim)  # pyright: ignore[reportAssignmentType]
    requires_grad = property(lambda self: self.value.requires_grad)  # pyright: ignore[reportAssignmentType]

    # As functions: PyTorch's operators take a TypeError, such as our NetworkError, for a reason to try the other
    # operand, which would then be multiplied or added without asking.
    def __matmul__(self, other: Any) -> Any:
        return torch.matmul(self, other)

    def __rmatmul__(self, other: Any) -> Any:
        return torch.matmul(other, self)

    def __mul__(self, other: Any) -> Any:
        return torch.mul(self, other)

    def __add__(self, other: Any) -> Any:
        return torch.add(self, other)

    __rmul__, __radd__ = __mul__, __add__  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        reader, reason = READERS.get(function), None
        context = _context(args) or next(_standins(kwargs.values())).context
        if reader is not None:
            try:
                answer = context.read(reader, function, args, kwargs)
                if answer is not NotImplemented:
                    return answer
            except NoRule as rule:
                reason = str(rule)
        with torch._C.DisableTorchFunctionSubclass():
            answer = function(*map(_plain, args), **{key: _plain(item) for key, item in kwargs.items()})
        numbers = isinstance(answer, Tensor | tuple | list) and not isinstance(answer, torch.Size)
        if numbers:  # and no size, device or flag
            context.without_rule(function, list(_standins((*args, *kwargs.values()))), reason)
        return answer


def _bare(value: Tensor) -> Standin:
    """A standin in the memory of a tensor, outside of its graph."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(value)  # pyright: ignore
    if wrapped or type(value) not in (Tensor, nn.Parameter):  # `vmap` and tracers have no memory to share
        with _disable_current_modes():
            return Tensor._make_subclass(Standin, torch.empty(0))  # pyright: ignore
    return Tensor._make_subclass(Standin, value)  # pyright: ignore


def plain(tensor: Any) -> Any:
    """The tensor behind a standin; anything else as it is."""
    return tensor.value if isinstance(tensor, Standin) else tensor


def chunks(tensor: Tensor | None, parts: int) -> list[Any]:
    """The equal parts of a parameter along its first axis; Nones for None."""
    if tensor is None:
        return [None] * parts
    return tensor.chunked(parts) if isinstance(tensor, Standin) else list(tensor.chunk(parts))


def _plain(argument: Any) -> Any:
    if isinstance(argument, list | tuple) and not isinstance(argument, torch.Size):
        return type(argument)(map(_plain, argument))
    return plain(argument)


def _context(arguments: Any) -> "Context | None":
    """That of the first standin, which mostly stands among the arguments themselves."""
    for argument in arguments:
        if isinstance(argument, Standin):
            return argument.context
    standin = next(_standins(arguments), None)
    return None if standin is None else standin.context


def _standins(arguments: Any) -> Iterator[Standin]:
    for argument in arguments:
        if isinstance(argument, Standin):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from _standins(argument)
