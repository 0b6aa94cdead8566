"""Laplace written out densely: Jacobians by torch.func, factors by hooks, precisions by their definitions."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn import functional as F

from dubito import EFB, INF, KFAC, Diagonal
from dubito.inputs import call


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(count: int, classes: int = 3, seed: int = 1) -> Tensor:
    return torch.randint(classes, (count,), generator=torch.Generator().manual_seed(seed))


def mlp(outputs: int = 3, inputs: int = 4, hidden: int = 6) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs, bias=False)).double()


def cnn(outputs: int = 3) -> nn.Sequential:
    """A plain convolution with a stride, a grouped one without bias, a linear layer: inputs [B, 2, 6, 5]."""
    return nn.Sequential(
        nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 6, 2, groups=2, bias=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(60, outputs),
    ).double()


def categorical_hessian(outputs: Tensor) -> Tensor:
    probs = outputs.softmax(-1)
    return probs.diag_embed() - probs.unsqueeze(-1) * probs.unsqueeze(-2)


def gaussian_hessian(std: float) -> Callable[[Tensor], Tensor]:
    return lambda outputs: torch.eye(outputs.shape[-1]).to(outputs).expand(len(outputs), -1, -1) / std**2


def jacobian(network: nn.Module, inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs [B, E] and, by parameter, their Jacobians [B, E, ...]."""
    network = copy.deepcopy(network).eval()
    parameters = {name: p.detach() for name, p in network.named_parameters()}

    def function(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        return functional_call(network, parameters, (row[None],))[0].flatten()

    with torch.no_grad():
        outputs = network(inputs).flatten(1)
    return outputs, vmap(jacrev(function), (None, 0))(parameters, inputs)


def dense_covariance(posterior, inputs) -> Tensor:
    """J P⁻¹ Jᵀ between the outputs of all rows, [B, E, B, E], everything dense."""
    parameters = {name: p.detach() for name, p in posterior.network.named_parameters()}

    def function(parameters: dict[str, Tensor]) -> Tensor:
        outputs = call(lambda *a, **k: functional_call(posterior.network, parameters, a, k), inputs)
        return outputs.reshape(len(outputs), -1)

    jacobians = jacrev(function)(parameters)
    total = torch.zeros(())
    for name, block in posterior.blocks.items():
        shape = jacobians[block.weight].shape[:2]
        flat = {key: jacobians[key].flatten(0, 1) for key in block.parameters}
        rows = range(len(flat[block.weight]))
        matrices = torch.stack([block.matrix({key: flat[key][row] for key in flat}) for row in rows])
        matrices = matrices.flatten(2)  # [B·E, G, m·n]
        dense = posterior.block(name).covariance_matrix
        if dense.ndim == 2 and block.groups > 1:  # a diagonal of all groups in one
            dense = torch.stack([part.diag() for part in dense.diagonal().chunk(block.groups)])
        dense = dense if dense.ndim == 3 else dense[None]
        product = torch.einsum("egi,gij,fgj->ef", matrices, dense, matrices)
        total = total + product.reshape(*shape, *shape)
    return total


@dataclass(frozen=True)
class Layer:
    """One layer's exact information per group, from all rows.

    Attributes:
        jacobians: of its matrix with the bias as the last column, [B, E, G, m, n].
        information: 1/N Σ Jᵀ H J, [G, mn, mn].
        inputs: A, [G, n, n].
        gradients: G, [G, m, m].
    """

    jacobians: Tensor
    information: Tensor
    inputs: Tensor
    gradients: Tensor

    def precision(self, structure, num_data: float, prior_precision: float) -> Tensor:
        """[G, mn, mn]."""
        prior = prior_precision * torch.eye(self.information.shape[-1]).to(self.information)
        return torch.stack([num_data * self._kept(structure, g) for g in range(len(self.inputs))]) + prior

    def _kept(self, structure, group: int) -> Tensor:
        exact = self.information[group]
        diagonal = exact.diagonal().diag()
        if isinstance(structure, Diagonal):
            return diagonal
        if isinstance(structure, KFAC):
            return torch.kron(self.gradients[group], self.inputs[group])
        basis = torch.kron(*(torch.linalg.eigh(f[group]).eigenvectors for f in (self.gradients, self.inputs)))
        eigenvalues = (basis.mT @ exact @ basis).diagonal()
        if isinstance(structure, EFB):
            return basis @ eigenvalues.diag() @ basis.mT
        assert isinstance(structure, INF)
        kept = self._rectangle(structure.rank)
        low_rank = basis[:, kept] @ eigenvalues[kept].diag() @ basis[:, kept].mT
        own, wanted = low_rank.diagonal(), exact.diagonal()
        if structure.guard == "congruence":
            shrink = (wanted / own).clamp(max=1).sqrt()
            low_rank = shrink[:, None] * low_rank * shrink
        return low_rank + (wanted - own).clamp(min=0).diag()

    def _rectangle(self, rank: int) -> Tensor:
        """Algorithm 1 over the groups' mean: rows and columns that hold one of the `rank` largest."""
        m, n = self.gradients.shape[-1], self.inputs.shape[-1]
        eigenvalues = torch.zeros(m * n, dtype=torch.float64)
        for group, exact in enumerate(self.information):
            factors = (f[group] for f in (self.gradients, self.inputs))
            basis = torch.kron(*(torch.linalg.eigh(f).eigenvectors for f in factors))
            eigenvalues += (basis.mT @ exact @ basis).diagonal()
        order = eigenvalues.argsort(descending=True)[:rank].tolist()
        rows, columns = {i // n for i in order}, {i % n for i in order}
        return torch.tensor([i * n + j for i in sorted(rows) for j in sorted(columns)])


def layers(network: nn.Module, inputs: Tensor, hessian: Callable[[Tensor], Tensor]) -> dict[str, Layer]:
    """Every linear layer and convolution of the network, by its path."""
    outputs, jacobians = jacobian(network, inputs)
    roots = torch.linalg.cholesky(hessian(outputs) + 1e-14 * torch.eye(outputs.shape[1]).double())
    network = copy.deepcopy(network).eval()
    seen: dict[str, tuple[nn.Module, Tensor, Tensor]] = {}

    def hook(path: str):
        def record(layer, args, output):
            seen[path] = (layer, args[0].detach(), output)
            return output.clone()  # in-place operations leave the recorded one alone

        return record

    for path, module in network.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            module.register_forward_hook(hook(path))
    answer = network(inputs).flatten(1)
    found = {}
    for path, (layer, a, h) in seen.items():
        groups = getattr(layer, "groups", 1)
        biased = layer.bias is not None
        own = jacobians[f"{path}.weight"].flatten(3)  # [B, E, out, n]
        if biased:
            own = torch.cat([own, jacobians[f"{path}.bias"].unsqueeze(-1)], -1)
        own = own.unflatten(2, (groups, -1))
        flat = torch.einsum("bce,bcgmn->begmn", roots, own).flatten(3)
        if isinstance(layer, nn.Conv2d):
            patches = F.unfold(a, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
            a = patches.mT.unflatten(2, (groups, -1)).transpose(1, 2)  # [B, G, T, n]
        else:
            a = a[:, None, None]
        a = torch.cat([a, torch.ones_like(a[..., :1])], -1) if biased else a
        moments = []
        for column in roots.unbind(-1):
            (g,) = torch.autograd.grad((answer * column).sum(), h, retain_graph=True)
            g = g.reshape(len(g), groups, own.shape[3], -1)  # [B, G, m, T]
            moments.append(torch.einsum("bgmt,bgkt->gmk", g, g) / g.shape[-1])
        found[path] = Layer(
            jacobians=own,
            information=torch.einsum("begi,begj->gij", flat, flat) / len(inputs),
            inputs=torch.einsum("bgtn,bgtk->gnk", a, a) / len(inputs),
            gradients=sum(moments) / len(inputs),
        )
    return found
