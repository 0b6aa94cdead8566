"""Statistics that processes share, or that one makes alone: `torchrun --nproc_per_node 2 shared_statistics.py folder`.

Each process writes what it has into the folder, as `name.rank`, and how often it sent and decomposed what.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from curvature_reference import normal, numbers
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from dubito import EFB, Bernoulli, Categorical, Fisher, Gaussian, Laplace
from dubito.curvature import find_blocks, statistics
from dubito.inputs import TensorOptions
from dubito.sources import as_source
from dubito.training import Processes, Training, current

ROWS = 37  # odd, so that shares differ


class Stream(IterableDataset):
    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.rows = list(zip(inputs, targets, strict=True))

    def __iter__(self):
        return iter(self.rows)


def network(kind: str, dtype: torch.dtype) -> tuple[nn.Module, tuple[int, ...]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if kind == "mlp":
            return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype), (4,)
        layers = (nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Tanh(), nn.Conv2d(8, 6, 3, groups=2))
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(24, 3)).to(dtype), (2, 4, 4)


#: name: (network, dtype, rows as a stream in an order of their own, number of rows)
RUNS = {
    "mlp, single": ("mlp", torch.float32, False, ROWS),
    "mlp, double": ("mlp", torch.float64, False, ROWS),
    "images": ("conv", torch.float64, False, ROWS),
    "stream": ("mlp", torch.float64, True, ROWS),
    "one row": ("mlp", torch.float64, False, 1),
}


def run(name: str, processes: Processes | None) -> dict[str, Tensor]:
    kind, dtype, stream, rows = RUNS[name]
    net, shape = network(kind, dtype)
    net.eval()
    inputs, targets = normal(rows, *shape, dtype=dtype), numbers(3, rows)
    data = DataLoader(Stream(inputs, targets), batch_size=5) if stream else (inputs, targets)
    source = as_source(data, TensorOptions.of(net))
    covered = find_blocks(net, inputs[:4], [name for name, _ in net.named_parameters()])
    blocks = list(covered.blocks.values())
    built = Categorical().build(net(inputs[:2]).detach())
    found = statistics(
        net, covered, source, built, Fisher(draws=2), kronecker=True, eigenvalues=True, diagonal=True,
        batch_size=5, seed=3, processes=processes,
    )  # fmt: skip
    return {
        f"{block.name}/{key}": value.contiguous()
        for block in blocks
        for key, value in vars(found[block.name]).items()
        if value is not None
    }


#: Whole fits: the likelihood also sums what rows say about the point.
FITS = {
    "fit, classes": Categorical(),
    "fit, yes or no": Bernoulli(),
    "fit, noise of residuals": Gaussian(),
    "fit, noise given": Gaussian(std=0.5),
}


def fit(name: str) -> dict[str, Tensor]:
    net, shape = network("mlp", torch.float64)
    inputs = normal(ROWS, *shape, dtype=torch.float64)
    targets = {"fit, classes": inputs[:, :3].argmax(1), "fit, yes or no": (inputs[:, :3] > 0).double()}
    data = (inputs, targets.get(name, inputs[:, :3].sin()))
    training = Training(epochs=20, batch_size=8, lr=3e-2)
    posterior = Laplace(structure=EFB(), batch_size=5).fit(net, data, FITS[name], training=training)
    if name == "fit, noise of residuals":  # of a network as given, so that the noise is not learned
        posterior = Laplace(structure=EFB(), batch_size=5).fit(posterior.fold(), data, FITS[name])
    tuned = posterior.tuned()
    facts = [posterior.details["log_likelihood"], tuned.prior_precision, tuned.log_marginal_likelihood()]
    variances = {f"{name}/variance": posterior.block(name).variance.contiguous() for name in posterior.blocks}
    return {"facts": torch.tensor(facts, dtype=torch.float64), **variances}


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    processes = current(60, torch.device("cpu"))
    counts = {"all_reduce": 0, "eigh": 0}
    module = sys.modules["dubito.curvature.statistics"]
    reduce, eigh = dist.all_reduce, module.eigh

    def counted_reduce(*args, **kwargs):
        counts["all_reduce"] += 1
        return reduce(*args, **kwargs)

    def counted_eigh(*args, **kwargs):
        counts["eigh"] += 1
        return eigh(*args, **kwargs)

    dist.all_reduce, module.eigh = counted_reduce, counted_eigh
    for name in RUNS:
        counts.update(all_reduce=0, eigh=0)
        save_file(run(name, processes), folder / f"{name}.{processes.rank}")
        (folder / f"{name}.{processes.rank}.json").write_text(json.dumps(counts))
    for name in FITS:
        save_file(fit(name), folder / f"{name}.{processes.rank}")


if __name__ == "__main__":
    main()
