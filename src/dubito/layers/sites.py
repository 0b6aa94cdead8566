"""Sites: weight tensors and the nodes on both sides of them, so that node factors can be folded into weights."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

LAYERS = (nn.Linear, _ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention, nn.Bilinear, nn.Embedding)


@dataclass(frozen=True)
class Site:
    """One weight tensor whose input and output nodes can carry factors.

    Attributes:
        parameter: the user's name of the weight.
        modules: the modules whose forward pass reads it (several where it is shared).
        shape: the shape of the factors: one number per input node.
        view: the shape in which the weight meets the factors.
        factor_view: the shape in which the factors meet the weight.
        hooked: whether the module multiplies its input by the weight directly, so that factors can be put on
            the input instead; else they are folded into the weight.
        channel_axis: the axis of the input, and of the output, that holds the nodes.
        outputs: the shape of the factors on the output side.
        output_view: the shape in which those meet the weight's `view`.
    """

    parameter: str
    modules: tuple[str, ...]
    shape: tuple[int, ...]
    view: tuple[int, ...]
    factor_view: tuple[int, ...]
    hooked: bool = False
    channel_axis: int = -1
    outputs: tuple[int, ...] = ()
    output_view: tuple[int, ...] = ()

    def fold(self, weight: Tensor, factors: Tensor | None, outputs: Tensor | None = None) -> Tensor:
        """W with its columns scaled by the input nodes' factors and its rows by the output nodes': W ∘ r sᵀ.

        The layer then answers (W ∘ r sᵀ) x = (W (x ∘ s)) ∘ r   [rank-1, Eq. 1]
        """
        folded = weight.reshape(self.view)
        if factors is not None:
            folded = folded * factors.reshape(self.factor_view)
        if outputs is not None:
            folded = folded * outputs.reshape(self.output_view)
        return folded.reshape(weight.shape)

    def add(self, weight: Tensor, factors: Tensor, outputs: Tensor) -> Tensor:
        """W + r sᵀ, the same at all positions of a kernel."""
        product = factors.reshape(self.factor_view) * outputs.reshape(self.output_view)
        return (weight.reshape(self.view) + product).reshape(weight.shape)

    def on_input(self, inputs: Tensor, factors: Tensor) -> Tensor:
        """The module's inputs [B, ...] with factors [B, nodes] on their channels."""
        shape = [1] * inputs.ndim
        shape[0], shape[self.channel_axis] = len(factors), factors.shape[-1]
        return inputs * factors.reshape(shape)

    def to_json(self) -> dict[str, Any]:
        """Plain values, for storage."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Site":
        """The site behind `to_json`."""
        fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
        }
        return cls(**fields)


def find_sites(network: nn.Module, *, embeddings: bool = False) -> list[Site]:
    """All sites of a network, in the order of its modules; a shared weight is one site.

    Args:
        network: the network.
        embeddings: take embeddings too: their input nodes are the tokens.
    """
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    sites: dict[str, Site] = {}
    users: dict[str, list[tuple[str, Site | None]]] = {}
    for path, module in network.named_modules(remove_duplicate=False):
        # A weight computed from others (a parametrisation) has no name of its own and cannot be folded.
        own = {
            names[id(w)]: Site(names[id(w)], (path,), *site)
            for w, site in _of_module(module, embeddings)
            if id(w) in names
        }
        for name in dict.fromkeys(names[id(parameter)] for parameter in module.parameters(recurse=False)):
            users.setdefault(name, []).append((path, own.get(name)))
            if name in own:
                sites.setdefault(name, own[name])
    for name, site in sites.items():
        modules = tuple(path for path, _ in users[name])
        # On the input only where all modules use the weight alike: an embedding tied to a linear layer, or a
        # convolution tied to a transposed one, would see other factors in training than in a folded weight.
        alike = all(
            user is not None and replace(user, modules=()) == replace(site, modules=())
            for _, user in users[name]
        )
        sites[name] = replace(site, modules=modules, hooked=site.hooked and alike)
    return list(sites.values())


def _of_module(module: nn.Module, embeddings: bool) -> list[tuple[Tensor, tuple[Any, ...]]]:
    """Weights of one module with the fields of their sites after the modules."""
    if isinstance(module, nn.Linear):
        return [(module.weight, _matrix(module.weight, hooked=True))]
    if isinstance(module, _ConvNd):
        return [(module.weight, _kernel(module))]
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        weights = [p for name, p in module.named_parameters(recurse=False) if name.startswith("weight_")]
        return [(weight, _matrix(weight)) for weight in weights]
    if isinstance(module, nn.MultiheadAttention):
        if module.in_proj_weight is None:
            separate = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
            return [(weight, _matrix(weight)) for weight in separate]
        size = module.embed_dim  # query, key and value projections stand in one tensor
        view = (3, size, size)
        return [(module.in_proj_weight, ((3, size), view, (3, 1, size), False, -1, (3, size), (3, size, 1)))]
    if isinstance(module, nn.Embedding) and embeddings:
        tokens, width = module.weight.shape
        shape = (tokens, width)
        return [(module.weight, ((tokens,), shape, (tokens, 1), True, -1, (width,), (1, width)))]
    return []


def _kernel(module: _ConvNd) -> tuple[Any, ...]:
    groups, nodes, outputs = module.groups, module.in_channels, module.out_channels
    kernel = tuple(module.weight.shape[2:])
    ones = tuple(1 for _ in kernel)
    inner, outer = nodes // groups, outputs // groups
    axis = -1 - len(kernel)
    if isinstance(module, _ConvTransposeNd):
        view = (groups, inner, outer, *kernel)
        sides = (groups, inner, 1, *ones), (groups, 1, outer, *ones)
    else:
        view = (groups, outer, inner, *kernel)
        sides = (groups, 1, inner, *ones), (groups, outer, 1, *ones)
    return (nodes,), view, sides[0], True, axis, (outputs,), sides[1]


def _matrix(weight: Tensor, hooked: bool = False) -> tuple[Any, ...]:
    rows, nodes = weight.shape
    return (nodes,), (rows, nodes), (1, nodes), hooked, -1, (rows,), (rows, 1)
