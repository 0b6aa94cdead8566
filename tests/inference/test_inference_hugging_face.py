"""Hugging Face encoders, built from a config without a download: factors, training, and dict inputs."""

import pytest
import torch

import dubito
from dubito import Categorical, Implicit, Rank1, Training

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
