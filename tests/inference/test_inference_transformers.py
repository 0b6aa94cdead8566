"""Whole models of Transformers, small and random, with data as that library's users have them."""

import copy
import warnings
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

import dubito
from dubito import (
    BALI,
    INF,
    KFAC,
    MAP,
    SWAG,
    Categorical,
    ConfigError,
    DataError,
    DeepEnsemble,
    Diagonal,
    DubitoWarning,
    Empirical,
    Fisher,
    KTied,
    Labelled,
    Laplace,
    MCDropout,
    MeanField,
    Rank1,
    Training,
)  # fmt: skip
from dubito.calibration import temperature_scaled
from dubito.curvature import find_blocks, statistics
from dubito.curvature.labels import LabelNoise
from dubito.fitting import prepare
from dubito.inputs import call, take
from dubito.training import EarlyStopping
from tests.training.examples import same

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:There is a performance drop"
)

WORDS, ROWS, IGNORED = 24, 10, -100
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TOKENS = Categorical(ignore_index=IGNORED)
CAUSAL = Categorical(ignore_index=IGNORED, shift=True)
QUICK = Training(iterations=2, batch_size=5, lr=1e-3)


def _small(kind: str, model: str, **options: Any) -> nn.Module:
    return getattr(transformers, model)(getattr(transformers, f"{kind}Config")(**options))


MODELS = {
    "bert": lambda: _small(
        "Bert", "BertForSequenceClassification", vocab_size=WORDS, hidden_size=8, num_hidden_layers=1,
        num_attention_heads=2, intermediate_size=12, max_position_embeddings=12, num_labels=3,
    ),
    "vit": lambda: _small(
        "ViT", "ViTForImageClassification", hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=12, image_size=8, patch_size=4, num_channels=1, num_labels=3,
    ),
    "gpt2": lambda: _small(
        "GPT2", "GPT2ForSequenceClassification", vocab_size=WORDS, n_positions=12, n_embd=8, n_layer=1, n_head=2,
        num_labels=3, **SPECIAL,
    ),
    "gpt2-lm": lambda: _small(
        "GPT2", "GPT2LMHeadModel", vocab_size=WORDS, n_positions=12, n_embd=8, n_layer=1, n_head=2, **SPECIAL
    ),
    "t5": lambda: _small(
        "T5", "T5ForConditionalGeneration", vocab_size=WORDS, d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    ),
    "llama": lambda: _small(
        "Llama", "LlamaForCausalLM", vocab_size=WORDS, hidden_size=8, intermediate_size=12, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=12, **SPECIAL,
    ),
}  # fmt: skip
CLASSES, CAUSALS = ("bert", "vit", "gpt2"), ("gpt2-lm", "llama")


@cache
def _made(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MODELS[name]()


def model(name: str) -> nn.Module:
    return copy.deepcopy(_made(name))


def sentences() -> dict[str, Tensor]:
    """Rows of 3 to 7 words, padded on the right."""
    stream = torch.Generator().manual_seed(1)
    ids = torch.randint(3, WORDS, (ROWS, 7), generator=stream)
    lengths = torch.tensor([3 + row % 5 for row in range(ROWS)])
    mask = (torch.arange(7) < lengths[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def batch_of(name: str) -> dict[str, Tensor]:
    """What a loader of Transformers' users gives, with `labels`."""
    inputs, stream = sentences(), torch.Generator().manual_seed(2)
    if name == "vit":
        inputs = {"pixel_values": torch.randn(ROWS, 1, 8, 8, generator=stream)}
    if name in CLASSES:
        return {**inputs, "labels": torch.randint(3, (ROWS,), generator=stream)}
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, IGNORED)
    if name == "t5":  # as DataCollatorForSeq2Seq(tokenizer, model=model) does
        inputs["decoder_input_ids"] = model(name).prepare_decoder_input_ids_from_labels(labels=labels)
    return {**inputs, "labels": labels}


def likelihood_of(name: str) -> Categorical:
    return Categorical() if name in CLASSES else CAUSAL if name in CAUSALS else TOKENS


class Ragged(Dataset):
    """Rows of their own lengths."""

    def __init__(self, batch: dict[str, Tensor]) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        length = int(self.batch["attention_mask"][row].sum())
        items = {name: tensor[row] for name, tensor in self.batch.items()}
        return {name: item[:length] if item.ndim else item for name, item in items.items()}


def padded(rows: list[dict[str, Tensor]]) -> Any:
    """A collator that pads to the longest row of the batch, as Transformers' own do."""
    fill = {"labels": IGNORED}
    return transformers.BatchEncoding(
        {
            name: pad_sequence([row[name] for row in rows], batch_first=True, padding_value=fill.get(name, 0))
            if rows[0][name].ndim
            else torch.stack([row[name] for row in rows])
            for name in rows[0]
        }
    )


METHODS = {
    "map": MAP(), "mean-field": MeanField(), "k-tied": KTied(), "rank1": Rank1(components=2),
    "kfac": Laplace(structure=KFAC()), "inf": Laplace(structure=INF(rank=4)), "diagonal": Laplace(structure=Diagonal()),
    "mc-dropout": MCDropout(rate=0.2), "swag": SWAG(), "ensemble": DeepEnsemble(members=2), "bali": BALI(),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::dubito.DubitoWarning")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", METHODS)
def test_methods_fit_models_to_batches_as_they_come(name, method):
    batch, likelihood = batch_of(name), likelihood_of(name)
    data: Any = batch
    if "attention_mask" in batch and name != "t5":  # batches of different lengths
        data = DataLoader(Ragged(batch), batch_size=5, collate_fn=padded, shuffle=True)
    posterior = METHODS[method].fit(model(name), data, likelihood, training=QUICK)
    values = posterior.evaluate(data, num_samples=2, max_rows=4)
    assert all(0 <= values[key] < 100 for key in values)
    inputs = {key: tensor for key, tensor in batch.items() if key != "labels"}
    prediction = posterior.predict(transformers.BatchEncoding(inputs), 2)
    shape = (ROWS, 3) if name in CLASSES else (ROWS, 7, WORDS)
    assert prediction.probs.shape == shape and prediction.probs.isfinite().all()


@pytest.mark.parametrize("name", ["bert", "gpt2-lm"])
@pytest.mark.parametrize("method", [MeanField(), Laplace(structure=KFAC(), batch_size=5)], ids=["mean-field", "kfac"])
def test_every_form_of_the_same_rows_gives_the_same_bits(name, method):
    datasets = pytest.importorskip("datasets")
    batch, likelihood = batch_of(name), likelihood_of(name)
    inputs = {key: tensor for key, tensor in batch.items() if key != "labels"}
    renamed = {**inputs, "truth": batch["labels"]}
    items = [{key: tensor[row] for key, tensor in batch.items()} for row in range(ROWS)]
    texts = {"text": [f"row {row}" for row in range(ROWS)]}
    table = datasets.Dataset.from_dict({**{k: t.tolist() for k, t in batch.items()}, **texts})
    forms = {
        "mapping": (batch, {}),
        "encoding": (transformers.BatchEncoding(batch), {}),
        "named": (renamed, {"target": "truth"}),
        "labelled": (Labelled(renamed, "truth"), {}),
        "rows": (items, {}),
        "loader": (DataLoader(items, batch_size=5), {}),
        "hugging face": (table, {}),
        "hugging face loader": (DataLoader(table.rename_column("labels", "label"), batch_size=5), {}),
        "hugging face tensors": (table.remove_columns("text").with_format("torch"), {}),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DubitoWarning)
        plain = method.fit(model(name), (inputs, batch["labels"]), likelihood, training=QUICK)
        truth = plain.evaluate((inputs, batch["labels"]), num_samples=2)
        for form, (data, options) in forms.items():
            posterior = method.fit(model(name), data, likelihood, training=QUICK, validation=data, **options)
            assert same(plain, posterior), form
            assert posterior.evaluate(data, num_samples=2, **options) == truth, form
    assert torch.equal(plain.predict(forms["loader"][0], 2).probs, plain.predict(inputs, 2).probs)


def test_names_that_are_not_there_are_refused_with_the_names_that_are():
    batch = batch_of("bert")
    with pytest.raises(DataError, match=r"targets as 'truth', got \['input_ids', 'attention_mask', 'labels'\]"):
        MAP().fit(model("bert"), batch, Categorical(), target="truth", training=QUICK)
    pair = sentences(), batch["labels"]
    with pytest.raises(DataError, match="target='labels' names an entry of batches that are mappings"):
        MAP().fit(model("bert"), DataLoader(Ragged2(*pair), batch_size=5), Categorical(), target="labels")
    with pytest.raises(DataError, match="DataCollatorWithPadding"):
        MAP().fit(model("bert"), Ragged(batch), Categorical(), training=QUICK)


class Ragged2(Dataset):
    def __init__(self, inputs: dict[str, Tensor], targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, row: int) -> Any:
        return take(self.inputs, row), self.targets[row]


# -- labels that say nothing -----------------------------------------------------------------------------------------


def test_the_loss_of_a_causal_model_is_its_own_times_the_labels_that_count():
    for name in CAUSALS:
        batch, net = batch_of(name), model(name).eval()
        theirs = net(**batch).loss.item()
        count = int((batch["labels"][:, 1:] != IGNORED).sum())
        posterior = MAP().fit(model(name), batch, CAUSAL, training=Training(iterations=1, lr=1e-30))
        values = posterior.evaluate(batch)
        assert values["nll_per_label"] == pytest.approx(theirs, rel=1e-5)
        assert values["nll"] == pytest.approx(theirs * count / ROWS, rel=1e-5)
        inputs = {key: tensor for key, tensor in batch.items() if key != "labels"}
        objective = MeanField().build(model(name), CAUSAL, ROWS)
        built = objective.loss(inputs, batch["labels"], generator=torch.Generator().manual_seed(0))
        # the evidence bound: every label that counts once, the divergence once
        total = ROWS * (built.total - built.nll)
        torch.testing.assert_close(total, built.kl)


def test_masked_models_are_judged_position_by_position():
    batch = batch_of("t5")
    net = model("t5").eval()
    posterior = MAP().fit(model("t5"), batch, TOKENS, training=Training(iterations=1, lr=1e-30))
    assert posterior.evaluate(batch)["nll_per_label"] == pytest.approx(net(**batch).loss.item(), rel=1e-5)
    prediction = posterior.predict({key: tensor for key, tensor in batch.items() if key != "labels"})
    seen = batch["labels"] != IGNORED
    right = (prediction.labels == batch["labels"])[seen].double().mean()
    assert posterior.evaluate(batch)["accuracy"] == pytest.approx(right.item())


def test_labels_that_repeat_the_inputs_are_refused_where_nothing_shifts_them():
    with pytest.raises(DataError, match="shift=True"):
        MAP().fit(model("llama"), batch_of("llama"), TOKENS, training=QUICK)
    with pytest.raises(ConfigError, match="ignore_index"):
        Categorical(shift=True)


@pytest.mark.filterwarnings("ignore::dubito.DubitoWarning")
@pytest.mark.parametrize("method", ["map", "mean-field", "rank1", "kfac", "diagonal", "ensemble", "bali"])
def test_rows_without_a_label_are_no_observations(method):
    """A fit to rows of which some have no label at all is that to the others, bit for bit."""
    batch = batch_of("bert")
    silent = torch.tensor([0, 4, 9])
    labels = batch["labels"].clone()
    labels[silent] = IGNORED
    others = torch.tensor([row for row in range(ROWS) if row not in silent.tolist()])
    part = {key: tensor[others] for key, tensor in batch.items()}
    given = {"training": Training(epochs=2, batch_size=4, lr=1e-3, early_stopping=EarlyStopping(patience=9))}
    fit = METHODS[method].fit
    truth = fit(model("bert"), part, TOKENS, validation=part, **given)
    whole = {**batch, "labels": labels}
    for data in (whole, [{key: tensor[row] for key, tensor in whole.items()} for row in range(ROWS)]):
        posterior = fit(model("bert"), data, TOKENS, validation=data, **given)
        assert same(posterior, truth) and posterior.history == truth.history
        assert posterior.evaluate(data, num_samples=2) == truth.evaluate(part, num_samples=2)
    plain = fit(model("bert"), part, Categorical(), validation=part, **given)
    if method not in ("map", "ensemble"):  # whose mean over rows PyTorch takes in a kernel of its own
        assert same(plain, truth)


@pytest.mark.filterwarnings("ignore::dubito.DubitoWarning")
def test_loaders_with_an_order_of_their_own_must_say_how_many_rows_have_a_label():
    batch = batch_of("bert")
    batch["labels"][:3] = IGNORED
    items = [{key: tensor[row] for key, tensor in batch.items()} for row in range(ROWS)]
    stream = torch.Generator().manual_seed(0)
    loader = DataLoader(items, batch_size=5, sampler=WeightedRandomSampler([1.0] * ROWS, ROWS, generator=stream))
    with pytest.raises(DataError, match="pass num_data=, the number of rows with a label"):
        MAP().fit(model("bert"), loader, TOKENS, training=Training(epochs=3))
    posterior = Laplace(structure=Diagonal()).fit(
        model("bert"), loader, TOKENS, num_data=7, training=Training(epochs=1, lr=1e-3)
    )
    assert posterior.num_data == 7
    with pytest.raises(DataError, match="at least one label that is not ignored"):
        MAP().fit(model("bert"), {**batch, "labels": torch.full((ROWS,), IGNORED)}, TOKENS)


def test_a_joint_pass_of_members_takes_batches_of_different_lengths():
    """Llama has no dropout, so its members could train in one pass; each has batches of its own lengths."""
    batch = batch_of("llama")
    loader = DataLoader(Ragged(batch), batch_size=3, collate_fn=padded)
    training = Training(epochs=2, lr=1e-3)
    both = DeepEnsemble(members=2).fit(model("llama"), loader, CAUSAL, training=training)
    first = MAP().fit(model("llama"), loader, CAUSAL, training=training, seed=dubito.seeds.derived(0, "member", 0))
    for name, tensor in first.network.state_dict().items():
        torch.testing.assert_close(both.network.state_dict()[name], tensor, rtol=1e-4, atol=1e-6)


# -- curvature -------------------------------------------------------------------------------------------------------


def curvature(net: nn.Module, data: Any, kind: Any, **wanted: bool) -> tuple[Any, dict[str, Any]]:
    """What the fit of a causal model reads off its rows: the cover of its blocks and their statistics."""
    prepared = prepare(net, data, CAUSAL)
    names = [name for name, _ in net.named_parameters()]
    cover = find_blocks(prepared.network, prepared.example.inputs, names)
    source, likelihood = prepared.source, prepared.likelihood
    return cover, statistics(prepared.network, cover, source, likelihood, kind, batch_size=4, seed=0, **wanted)


@pytest.mark.parametrize("kind", [Empirical(), Fisher(draws=2)], ids=["empirical", "fisher"])
@pytest.mark.parametrize("name", CAUSALS)
def test_the_diagonal_is_that_of_per_example_gradients_of_labels_that_count(name, kind):
    batch, net = batch_of(name), model(name).double().eval()
    cover, found = curvature(net, batch, kind, diagonal=True)
    inputs = {key: tensor for key, tensor in batch.items() if key != "labels"}
    labels = torch.cat([batch["labels"][:, 1:], torch.full((ROWS, 1), IGNORED)], 1)
    outputs, drawn = call(net, inputs), [labels]
    if isinstance(kind, Fisher):
        noise, built = LabelNoise(0).at(0, outputs.detach()), CAUSAL.build(outputs)
        drawn = [built.sample_with(outputs, noise(n)).where(labels != IGNORED, IGNORED) for n in range(2)]
    named = dict(net.named_parameters())
    truth = {key: torch.zeros_like(p) for key, p in named.items()}
    for some in drawn:
        for row in range(ROWS):
            terms = nn.functional.cross_entropy(outputs[row], some[row], ignore_index=IGNORED, reduction="sum")
            gradients = torch.autograd.grad(terms, list(named.values()), retain_graph=True)
            for key, gradient in zip(named, gradients, strict=True):
                truth[key] += gradient.square() / len(drawn)
    actual: dict[str, Tensor] = {}
    for block in cover.blocks.values():
        actual |= block.tensors(ROWS * found[block.name].diagonal)
    assert set(actual) == {*named} - {*cover.left_out} and len(actual) >= len(named) - 1
    for key, value in actual.items():
        scale = truth[key].abs().max()
        assert (value - truth[key]).abs().max() <= 1e-10 * max(scale, 1e-6), key


@pytest.mark.parametrize("name", CAUSALS)
def test_factors_do_not_depend_on_how_far_rows_are_padded(name):
    """A and G of whole batches are those of batches of their own lengths, and of rows padded further."""
    batch, net = batch_of(name), model(name).double()
    wider = {key: nn.functional.pad(t, (0, 3), value=IGNORED if key == "labels" else 0) for key, t in batch.items()}
    ragged = DataLoader(Ragged(batch), batch_size=4, collate_fn=padded)
    _, truth = curvature(net, ragged, Empirical(), kronecker=True)
    for data in (batch, wider):
        _, found = curvature(net, data, Empirical(), kronecker=True)
        for key, means in truth.items():
            for side in ("inputs", "gradients"):
                first, second = getattr(found[key], side), getattr(means, side)
                if second is not None:
                    assert (first - second).norm() <= 1e-9 * second.norm(), (key, side)


def test_a_row_alone_has_the_factors_of_its_labels():
    """One row of T labels: A is Σ a aᵀ and G is 1/T Σ g gᵀ over the positions that labels depend on."""
    net, batch = model("llama").double().eval(), take(batch_of("llama"), slice(4, 5))
    batch = {key: tensor.clone() for key, tensor in batch.items()}
    batch["labels"][:, 4:] = IGNORED  # the last labels count no more: positions 0 to 2 have one
    _, found = curvature(net, batch, Empirical(), kronecker=True)
    head, seen = net.lm_head, {}
    head.register_forward_hook(lambda _, inputs, outputs: seen.update(a=inputs[0], f=outputs))
    outputs = net(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    nn.functional.cross_entropy(outputs[0, :3], batch["labels"][0, 1:4], reduction="sum").backward(inputs=[head.weight])
    a = seen["a"][0, :3].detach()
    g = outputs[0, :3].softmax(-1) - nn.functional.one_hot(batch["labels"][0, 1:4], WORDS)
    torch.testing.assert_close(found["lm_head"].inputs[0], a.T @ a)
    torch.testing.assert_close(found["lm_head"].gradients[0], (g.T @ g / 3).detach())


# -- predictions -----------------------------------------------------------------------------------------------------


def test_rows_of_different_lengths_are_predicted_as_long_as_the_longest():
    batch = batch_of("gpt2-lm")
    posterior = MeanField().fit(model("gpt2-lm"), batch, CAUSAL, training=QUICK)
    loader = DataLoader(Ragged(batch), batch_size=4, collate_fn=padded)
    prediction = posterior.predict(loader, 3, max_rows=4)
    inputs = {key: tensor for key, tensor in batch.items() if key != "labels"}
    truth, there = posterior.predict(inputs, 3), batch["attention_mask"].bool()
    assert prediction.probs.shape == truth.probs.shape
    torch.testing.assert_close(prediction.probs[there], truth.probs[there], rtol=1e-4, atol=1e-6)
    # rows 4 to 7 are at most 7 words long, rows 0 to 3 at most 6: position 6 of those is in no batch
    assert torch.allclose(prediction.probs[:4, 6], torch.tensor(1 / WORDS))
    values = posterior.evaluate(loader, num_samples=3, max_rows=4)
    assert values == pytest.approx(posterior.evaluate(batch, num_samples=3), rel=1e-4)


def test_a_temperature_is_that_of_the_labels_that_count():
    batch = batch_of("bert")
    trained = MAP().fit(model("bert"), batch, TOKENS, training=Training(iterations=150, lr=1e-2))
    wrong = {**batch, "labels": (batch["labels"] + (torch.arange(ROWS) % 5 == 0)) % 3}
    silent = {key: torch.cat([batch[key], wrong[key]]) for key in batch}
    silent["labels"][:ROWS] = IGNORED
    ours, truth = (temperature_scaled(trained, data).likelihood.settings for data in (silent, wrong))
    assert ours == truth and ours.ignore_index == IGNORED and 0.05 < ours.temperature < 40


def test_a_temperature_needs_rows_of_one_length():
    batch = batch_of("gpt2-lm")
    posterior = MAP().fit(model("gpt2-lm"), batch, CAUSAL, training=QUICK)
    with pytest.raises(DataError, match="rows of one length"):
        temperature_scaled(posterior, DataLoader(Ragged(batch), batch_size=4, collate_fn=padded), max_rows=4)


def test_positions_count_where_pixels_are_classes_and_some_are_void():
    """Segmentation has its classes on axis 1, and a label for pixels that nobody named."""
    stream = torch.Generator().manual_seed(0)
    x, y = torch.randn(6, 2, 4, 4, generator=stream), torch.randint(3, (6, 4, 4), generator=stream)
    y[:, 0] = 255
    net = nn.Conv2d(2, 3, 1)
    posterior = MAP().fit(net, (x, y), Categorical(ignore_index=255), training=Training(iterations=1, lr=1e-30))
    truth = nn.functional.cross_entropy(net(x), y, ignore_index=255).item()
    values = posterior.evaluate((x, y))
    assert values["nll_per_label"] == pytest.approx(truth, rel=1e-5)
    assert posterior.likelihood.settings.class_axis == 1
    with pytest.raises(DataError, match="got 200 at row 1"):
        MAP().fit(net, (x, y.index_fill(0, torch.tensor([1]), 200)), Categorical(ignore_index=255))
    with pytest.raises(DataError, match="class_axis"):
        Laplace().fit(net, (x, y[:, :3]), Categorical(ignore_index=255))
