"""Memory of adapters on a base of the size of a 1B model, in peaks of plain fine-tuning of the same adapters."""

import json
import os
import resource
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dubito import (
    INF,
    KFAC,
    BatchEnsemble,
    Categorical,
    Implicit,
    KTied,
    Laplace,
    MCDropout,
    MeanField,
    Rank1,
    Training,
)

from .bars import ROOT, Bar, Values, benchmark

METHODS: dict[str, Any] = {
    "k-tied": KTied(),
    "rank-1": Rank1(components=1),
    "BatchEnsemble": BatchEnsemble(components=1),
    "implicit": Implicit(components=1),
    "MC dropout": MCDropout(),
    "mean field": MeanField(),
    "KFAC": Laplace(structure=KFAC()),
    "INF": Laplace(structure=INF(rank=100)),
}
ROWS, TOKENS = 2, 16


def model() -> nn.Module:
    """A random bfloat16 Llama of 1.2 billion numbers, LoRA on the queries and values of its last four layers."""
    import transformers
    from peft import LoraConfig, get_peft_model

    layers = int(os.environ.get("ADAPTER_LAYERS", "16"))
    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, head_dim=64, num_labels=2, pad_token_id=0,  # pyright: ignore[reportCallIssue]
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    base = transformers.LlamaForSequenceClassification(config)
    torch.set_default_dtype(torch.float32)
    last = list(range(max(layers - 4, 0), layers))
    lora = LoraConfig(task_type="SEQ_CLS", r=8, target_modules=["q_proj", "v_proj"], layers_to_transform=last)
    return get_peft_model(base, lora)  # pyright: ignore[reportArgumentType]


def data() -> tuple[Tensor, Tensor]:
    """Two rows of words, and their classes."""
    stream = torch.Generator().manual_seed(0)
    return torch.randint(1, 128256, (ROWS, TOKENS), generator=stream), torch.arange(ROWS) % 2


def case(name: str) -> dict[str, float]:
    """One step and one prediction in this process: its peak and what a file takes."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    net, (words, classes) = model(), data()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    facts = {"model": before}
    if name == "plain":
        optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad])
        net.train()
        nn.functional.cross_entropy(net(words).logits.float(), classes).backward()
        optimizer.step()
        with torch.no_grad():
            net.eval()(words)
    else:
        training = None if name in ("KFAC", "INF") else Training(iterations=1, batch_size=ROWS)
        posterior = METHODS[name].fit(net, (words, classes), Categorical(), training=training, progress=False)
        posterior.predict(words[:1], num_samples=1)
        facts["peak before saving"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        rows = [row.num_parameters for row in posterior.summary().rows if row.name in posterior.trainable]
        with tempfile.TemporaryDirectory() as folder:
            posterior.save(path := Path(folder) / "p.safetensors")
            facts["file"] = path.stat().st_size / (4 * sum(rows))
    return {**facts, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def measured(name: str) -> dict[str, float]:
    """A case in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.adapters", name]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return json.loads(done.stdout.splitlines()[-1])


@benchmark(
    {
        **{name: Bar(1.1, "plain fine-tunings") for name in METHODS if name not in ("mean field", "KFAC", "INF")},
        **{name: Bar(None, "plain fine-tunings") for name in ("mean field", "KFAC", "INF")},
        **{f"{name}, file": Bar(1.05, "of its numbers") for name in METHODS},
    }
)
def adapters(rounds: int) -> Values:
    """Llama of 1.2 billion bfloat16 numbers, LoRA of rank 8 in four layers, 2 rows of 16 words; peak memory, once."""
    plain, values = measured("plain")["peak"], {}
    for name in METHODS:
        facts = measured(name)
        values |= {name: [facts["peak"] / plain], f"{name}, file": [facts["file"]]}
    return values


if __name__ == "__main__":
    print(json.dumps(case(sys.argv[1])))
