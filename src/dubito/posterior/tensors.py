"""Tensors by the names of a network's parameters, and which of them a file holds."""

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from .. import storage
from ..layers.tree import is_shared


class NamedTensors(nn.Module):
    """Tensors under the user's dotted parameter names, which `nn.ParameterDict` does not allow."""

    def __init__(self, tensors: Mapping[str, Tensor], *, buffers: bool = False) -> None:
        super().__init__()
        # The slash in front keeps them apart from a module's attributes (`items`), doubled ones from dots.
        self.names = {name: "/" + name.replace("/", "//").replace(".", "/") for name in tensors}
        for name, tensor in tensors.items():
            if buffers:
                self.register_buffer(self.names[name], tensor)
            else:
                whole = isinstance(tensor, nn.Parameter)
                value = tensor if whole else nn.Parameter(tensor, requires_grad=False)
                self.register_parameter(self.names[name], value)

    def __getitem__(self, name: str) -> Tensor:
        return getattr(self, self.names[name])

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Pairs of the user's name and the tensor."""
        return ((name, self[name]) for name in self.names)


def flagged(network: nn.Module) -> set[str]:
    """The names of the parameters that require gradients."""
    return {name for name, parameter in network.named_parameters() if parameter.requires_grad}


def stored_tensors(network: nn.Module, *, shared: bool = True) -> dict[str, Tensor]:
    """The parameters, without those of a shared base if asked, and the buffers a state dict would hold, by name."""
    state = network.state_dict(keep_vars=True)
    buffers = {name: tensor for name, tensor in network.named_buffers() if name in state}
    return {name: p for name, p in network.named_parameters() if shared or not is_shared(p)} | buffers


def base_of(network: nn.Module) -> dict[str, str]:
    """Dtype and checksum of every parameter that the network shares with the user's, by name, in their order."""
    return {
        name: f"{str(tensor.dtype)[6:]} {storage.checksum({'': tensor})[:16]}"
        for name, tensor in network.named_parameters()
        if is_shared(tensor)
    }
