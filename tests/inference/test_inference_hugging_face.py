"""Hugging Face encoders, built from a config without a download: factors, training, and dict inputs."""

import pytest
import torch

import dubito
from dubito import Categorical, Implicit, Rank1, Training
from dubito.inputs import call, take
from dubito.layers import survey
from dubito.layers.record import BlockPart, Record, recorded

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def encoder() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=30,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=12,
        num_labels=3,
    )
    return transformers.BertForSequenceClassification(config)


def sentences(count: int):
    stream = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 30, (count, 7), generator=stream)
    mask = torch.ones_like(ids)
    mask[::2, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask}, torch.randint(3, (count,), generator=stream)


@pytest.mark.parametrize("method", [Implicit(components=2), Rank1(components=2)], ids=["implicit", "rank1"])
def test_an_encoder_gets_factors_trains_and_predicts(method, tmp_path):
    inputs, targets = sentences(12)
    net = encoder()
    training = Training(epochs=1, batch_size=6, lr=1e-3)
    posterior = method.fit(net, (inputs, targets), Categorical(), training=training)
    holds = {row.name: row.holds for row in posterior.summary().rows}
    for layer in ("query", "key", "value"):
        name = f"bert.encoder.layer.1.attention.self.{layer}.weight"
        assert "Normal on 16 inputs" in holds[name] and "per component and batch" not in holds[name]
    assert "Normal on 24 inputs" in holds["bert.encoder.layer.0.output.dense.weight"]
    prediction = posterior.predict(inputs, 4)
    assert prediction.probs.shape == (12, 3) and (prediction.epistemic > 0).any()
    posterior.save(tmp_path / "p.safetensors")
    again = dubito.load(tmp_path / "p.safetensors", encoder())
    assert torch.equal(again.sample_outputs(inputs, 2), posterior.sample_outputs(inputs, 2))


def test_zero_noise_leaves_the_encoder_as_it_was():
    inputs, targets = sentences(6)
    net = encoder().eval()
    built = Implicit(components=2, mean_std=0.0).build(net, Categorical(), 6)
    built.bind(inputs)
    with torch.no_grad():
        for _, raw in built.draft.group("input_raw_std").items():
            raw.fill_(-100.0)
    plain = net(**inputs).logits.detach()
    built.modes = {name: False for name, _ in net.named_modules()}  # no dropout of its own
    outputs = built.outputs(dubito.inputs.Batch(inputs, targets), None)
    torch.testing.assert_close(outputs.detach(), plain, rtol=1e-5, atol=1e-6)


# -- what the survey covers --------------------------------------------------------------------------------------


def gpt2() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=30, n_positions=12, n_embd=16, n_layer=1, n_head=2, num_labels=3, pad_token_id=0
    )
    return transformers.GPT2ForSequenceClassification(config)


def llama() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=30,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=12,
        num_labels=3,
        pad_token_id=0,
    )
    return transformers.LlamaForSequenceClassification(config)


NO_ROW = "no row changes what its layer reads"
NETWORKS = {
    # a network, its number of parameters, and why some are not covered
    "gpt2": (gpt2, 17, {"transformer.wpe.weight": NO_ROW}),
    "bert": (encoder, 41, {"bert.embeddings.position_embeddings.weight": NO_ROW}),
    "llama": (llama, 12, {}),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_survey_covers_all_but_tables_that_no_row_changes(name):
    make, count, reasons = NETWORKS[name]
    net, (inputs, _) = make().eval(), sentences(4)
    seen = survey(net, inputs)
    assert dict(seen.reasons) == reasons
    covered = [key for key, _ in net.named_parameters() if key not in seen.reasons]
    assert len(list(net.parameters())) == count and len(covered) == count - len(reasons)
    assert all(seen.of(key) for key in covered)


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_of_rows_are_autograds(name):
    make, _, reasons = NETWORKS[name]
    net, (inputs, _) = make().double().eval(), sentences(4)
    seen = survey(net, inputs)
    named = {key: p for key, p in net.named_parameters() if key not in reasons}
    record = Record(seen.layout_of)
    with recorded(net, named, record) as shell:
        call(shell, inputs).sin().sum().backward()
    for row in range(4):
        loss = call(net, take(inputs, slice(row, row + 1))).sin().sum()
        truth = torch.autograd.grad(loss, list(named.values()))
        scale = max(float(each.abs().max()) for each in truth)
        for key, expected in zip(named, truth, strict=True):
            gradient = BlockPart(key, None, None).gradients(record.of((key, 0)), 4, slice(row, row + 1))
            # Keys' biases have gradients that are zero but for rounding.
            assert (gradient.reshape(expected.shape) - expected).abs().max() <= 1e-12 * scale, key


@pytest.mark.filterwarnings("ignore::dubito.DubitoWarning")
@pytest.mark.parametrize("method", ["rank1", "laplace-kfac"])
@pytest.mark.parametrize("name", NETWORKS)
def test_methods_treat_what_the_survey_covers(name, method):
    make, count, reasons = NETWORKS[name]
    inputs, targets = sentences(8)
    training = Training(epochs=1, batch_size=8, lr=1e-3)
    chosen = Rank1(components=2) if method == "rank1" else dubito.Laplace(structure=dubito.KFAC())
    posterior = chosen.fit(make(), (inputs, targets), Categorical(), training=training)
    holds = {row.name: row.holds for row in posterior.summary().rows}
    assert len(holds) == count
    points = {key for key, held in holds.items() if held.startswith("point")}
    if method == "rank1":  # vectors carry no factors
        shapes = {key: p.ndim for key, p in posterior.network.named_parameters()}
        assert {key for key in points if shapes[key] > 1} <= set(reasons)
    else:
        assert points == set(reasons)
    assert all("(" in holds[key] for key in points)
    assert torch.isfinite(posterior.predict(inputs, 2).probs).all()
