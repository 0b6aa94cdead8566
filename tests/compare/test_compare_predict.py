"""Saved posteriors on new rows: columns, uncertainty, sets, rows unlike training, differences named."""

import csv
import json

import numpy as np
import pandas
import pytest
import torch

import dubito
from dubito import ConfigError, DataError, StorageError, Training
from dubito.cli import main
from dubito.compare import Settings, compare
from dubito.compare.export import columns
from dubito.compare.folder import Folder
from dubito.compare.network import Network
from dubito.compare.new_rows import RowReader
from dubito.compare.predict import _check_words, kept_columns, predict, saved
from dubito.compare.task import make_task
from dubito.data import Scaling, load
from dubito.report import write_page

QUICK = Training(iterations=60, batch_size=32, lr=1e-2)


def quick(data, **options):
    return Settings(data=str(data), training=QUICK, num_samples=8, **options)


@pytest.fixture(scope="module")
def houses(tmp_path_factory):
    folder = tmp_path_factory.mktemp("houses")
    stream = np.random.default_rng(0)
    frame = pandas.DataFrame({"area": stream.normal(100, 20, 90), "city": stream.choice(["Rome", "Oslo"], 90)})
    frame["price"] = 2 * frame.area + 30 * (frame.city == "Oslo") + stream.normal(0, 5, 90)
    frame.to_csv(folder / "prices.csv", index=False)
    settings = quick(folder / "prices.csv", target="price")
    compare(settings, ["map", "mc-dropout"], out=folder / "out")
    return folder, frame, settings


def test_predictions_are_those_of_the_posterior(houses, tmp_path):
    folder, frame, settings = houses
    task = make_task(settings)
    posterior = dubito.load(folder / "out" / "mc-dropout.safetensors", task.network.build())
    new = frame.drop(columns="price").head(5)
    new.to_csv(tmp_path / "new.csv", index=False)
    found = predict(folder / "out" / "mc-dropout.safetensors", tmp_path / "new.csv", level=0.8)
    assert list(found.columns) == [
        "mean", "std", "aleatoric_std", "epistemic_std", "lower_80", "upper_80", "unlike_training",
    ]  # fmt: skip
    assert found.differences == ()
    city = [[float(name == other) for other in ("Oslo", "Rome")] for name in new.city]
    inputs = torch.tensor([[area, *words] for area, words in zip(new.area, city, strict=True)], dtype=torch.float64)
    scaled = task.data.input_scaling.apply(inputs).float()
    expected = posterior.predict(scaled, num_samples=8, seed=0).rescaled(*task.data.target_scaling)
    assert found.columns["mean"] == pytest.approx(expected.mean[:, 0].tolist(), rel=1e-5)
    assert found.columns["epistemic_std"] == pytest.approx(expected.epistemic_std[:, 0].tolist(), rel=1e-4)
    assert found.columns["aleatoric_std"] == pytest.approx(expected.aleatoric_std[:, 0].tolist(), rel=1e-4)
    assert found.columns["upper_80"] == pytest.approx(expected.interval(0.8)[1][:, 0].tolist(), rel=1e-4)


def test_rows_unlike_training_are_flagged_and_differences_named(houses, tmp_path, capsys):
    folder, _, _ = houses
    new = pandas.DataFrame({"area": [100.0, 1e5, np.nan], "city": ["Rome", "Oslo", "Lima"], "colour": "red"})
    new.to_csv(tmp_path / "new.csv", index=False)
    out = tmp_path / "predictions.csv"
    path = str(folder / "out" / "mc-dropout.safetensors")
    assert main(["predict", path, str(tmp_path / "new.csv"), "--out", str(out)]) == 0
    told = capsys.readouterr().err
    for text in (
        "not used, for training did not have it: colour",
        "area: 1 values missing, where training had all",
        "city: 'Lima' did not occur in training",
        "rows are unlike training",
    ):
        assert text in told
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["unlike_training"] for row in rows[:2]] == ["False", "True"] and len(rows) == 3
    new.drop(columns="city").to_csv(tmp_path / "new.csv", index=False)
    with pytest.raises(DataError, match="lacks columns that training had: city; it has colour instead"):
        predict(path, tmp_path / "new.csv")


def test_the_command_hears_level_samples_and_seed(houses, tmp_path):
    folder, frame, _ = houses
    frame.drop(columns="price").head(3).to_csv(tmp_path / "new.csv", index=False)
    path, out = folder / "out" / "mc-dropout.safetensors", tmp_path / "predictions.csv"
    told = ["--level", "0.5", "--samples", "7", "--seed", "3", "--out", str(out)]
    assert main(["predict", str(path), str(tmp_path / "new.csv"), *told]) == 0
    expected = predict(path, tmp_path / "new.csv", level=0.5, num_samples=7, seed=3).columns
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert "upper_50" in expected and list(rows[0]) == list(expected)
    for name in ("mean", "epistemic_std", "upper_50"):
        assert [float(row[name]) for row in rows] == pytest.approx(expected[name], rel=1e-5)


KEPT = {"id": ["12345678", "", "12345680"], "zip": ["01234", "NA", " 1e5"], "sum": ["1234567.25", "1,5", "03/04/2020"]}


def test_kept_columns_stand_as_in_the_file_and_numbers_in_full(houses, tmp_path):
    folder, frame, _ = houses
    path, new, out = folder / "out" / "mc-dropout.safetensors", tmp_path / "new.csv", tmp_path / "predictions.csv"
    rows = frame.drop(columns="price").head(3).assign(**KEPT)
    rows.to_csv(new, index=False, quoting=csv.QUOTE_NONNUMERIC)
    assert main(["predict", str(path), str(new), "--keep", "id,zip,sum", "--out", str(out)]) == 0
    found = predict(path, new, keep=["id", "zip", "sum"]).columns
    with out.open() as file:
        written = list(csv.DictReader(file))
    for name, texts in KEPT.items():
        assert [row[name] for row in written] == texts
        assert found[name] == [text or None for text in texts]
    for name in ("mean", "epistemic_std", "upper_95"):
        assert [float(row[name]) for row in written] == found[name]


@pytest.mark.parametrize("suffix", ["parquet", "xlsx"])
def test_kept_values_of_typed_files_are_whole(tmp_path, suffix):
    rows = pandas.DataFrame({"id": [12345678, None, 12345680], "zip": ["01", None, "2"], "share": [0.1, 2.5, None]})
    rows["day"] = pandas.to_datetime(["2020-01-31", None, "2020-02-01"])
    path, rows = tmp_path / f"new.{suffix}", rows.astype({"id": "Int64"})
    if suffix == "xlsx":
        pytest.importorskip("openpyxl")
        rows.to_excel(path, index=False)
    else:
        arrow = pytest.importorskip("pyarrow")
        plain = arrow.Table.from_pandas(rows).replace_schema_metadata()  # as other programs write it
        pytest.importorskip("pyarrow.parquet").write_table(plain, path)
    kept = kept_columns(path, ["id", "zip", "share", "day"], ())
    assert str(list(kept.values())) == str(
        [[12345678, None, 12345680], ["01", None, "2"], [0.1, 2.5, None], ["2020-01-31", None, "2020-02-01"]]
    )


def test_a_small_spread_around_a_large_mean_is_told(tmp_path):
    stream = np.random.default_rng(0)
    table = pandas.DataFrame({"x": stream.normal(size=60)})
    table["y"] = 2.0**24 + table.x + 0.1 * stream.normal(size=60)
    table.to_csv(tmp_path / "own.csv", index=False, float_format="%.17g")
    compare(quick(tmp_path / "own.csv", target="y"), ["map"], out=tmp_path / "out")
    columns = pandas.DataFrame(predict(tmp_path / "out" / "map.safetensors", tmp_path / "own.csv").columns)
    assert ((columns.lower_95 < columns["mean"]) & (columns["mean"] < columns.upper_95)).all()
    assert columns["mean"].nunique() == 60 and (columns["mean"] - table.y).abs().mean() < 0.8


def test_one_network_flags_nothing_and_says_so(houses, tmp_path, capsys):
    folder, frame, _ = houses
    frame.drop(columns="price").head(2).to_csv(tmp_path / "new.csv", index=False)
    path = str(folder / "out" / "map.safetensors")
    assert main(["predict", path, str(tmp_path / "new.csv"), "--json"]) == 0
    printed = capsys.readouterr()
    content = json.loads(printed.out)
    assert content["columns"]["unlike_training"] == [False, False]
    told = "holds no epistemic uncertainty"
    assert told in content["note"] and told in printed.err


def test_classes_have_labels_sets_and_probabilities(tmp_path):
    compare(quick("breast-cancer"), ["mc-dropout"], out=tmp_path / "two")
    compare(quick("digits", held_out=0), ["mc-dropout"], out=tmp_path / "ten")
    for folder, data in (("two", "breast-cancer"), ("ten", "digits")):
        task = make_task(quick(data, held_out=0))
        original = task.data.input_scaling.undo(task.test.inputs[:40]).numpy()
        pandas.DataFrame(original, columns=task.data.feature_names).to_csv(tmp_path / "new.csv", index=False)
        found = predict(tmp_path / folder / "mc-dropout.safetensors", tmp_path / "new.csv").columns
        names = task.class_names
        probs = np.array([found[f"prob_{name}"] for name in names])
        np.testing.assert_allclose(probs.sum(0), 1, atol=1e-5)
        assert found["label"] == [names[place] for place in probs.argmax(0)]
        truth = [names[int(target)] for target in task.test.targets[:40]]
        assert np.mean([a == b for a, b in zip(found["label"], truth, strict=True)]) > 0.7
        for label, members in zip(found["label"], found["set_95"], strict=True):
            assert label in members.split(" | ")
        np.savez(tmp_path / "new.npz", inputs=original)
        again = predict(tmp_path / folder / "mc-dropout.safetensors", tmp_path / "new.npz").columns
        assert again["label"] == found["label"]


def test_several_targets_are_named(tmp_path):
    stream = np.random.default_rng(0)
    frame = pandas.DataFrame(stream.normal(size=(40, 2)), columns=["a", "b"])
    frame["u"], frame["v"] = frame.a + 100, -50 * frame.b
    frame.to_csv(tmp_path / "own.csv", index=False)
    compare(quick(tmp_path / "own.csv", target="u,v"), ["mc-dropout"], out=tmp_path / "out")
    page = write_page(tmp_path / "out").read_text()
    for text in ("epistemic_std, the units of u", "epistemic_std, the units of v", "geometric mean over the targets"):
        assert text in page
    columns = predict(tmp_path / "out" / "mc-dropout.safetensors", tmp_path / "own.csv").columns
    assert {"mean_u", "mean_v", "lower_95_v", "upper_95_u", "unlike_training"} <= set(columns)
    for name in ("u", "v"):
        assert np.corrcoef(columns[f"mean_{name}"], frame[name])[0, 1] > 0.8
        total = np.square(columns[f"aleatoric_std_{name}"]) + np.square(columns[f"epistemic_std_{name}"])
        np.testing.assert_allclose(np.square(columns[f"std_{name}"]), total, rtol=1e-5)
    assert abs(np.mean(columns["mean_u"]) - 100) < 2
    result = Folder(tmp_path / "out").result("mc-dropout")
    assert result is not None
    noise = {name: parts["test"]["aleatoric_std"][0] for name, parts in result.evidence["decomposition_std"].items()}
    expected = {name: columns[f"aleatoric_std_{name}"][0] for name in ("u", "v")}
    assert noise == pytest.approx(expected, rel=6e-3)  # each in its own unit, to three digits


@pytest.mark.parametrize("target", ["u", "u,v"])
def test_rows_are_unlike_training_in_whatever_units(tmp_path, target):
    """The units of targets, of one or of several, decide neither ranks of uncertainty nor who is unlike training."""
    stream = np.random.default_rng(0)
    inputs = pandas.DataFrame(stream.normal(size=(120, 2)), columns=["a", "b"])
    noisy = inputs.a + 0.1 * stream.normal(size=120)
    (60 * inputs).to_csv(tmp_path / "far.csv", index=False)
    found = []
    for unit in (1e-6, 1.0, 1e6):
        columns = {"u": unit * noisy, "v": inputs.b - inputs.a}
        table, out = tmp_path / "own.csv", tmp_path / f"{unit}"
        own = inputs.assign(**{name: columns[name] for name in target.split(",")})
        own.to_csv(table, index=False, float_format="%.17g")
        (row,) = compare(quick(table, target=target), ["deep-ensemble"], out=out).rows
        flagged = predict(out / "deep-ensemble.safetensors", tmp_path / "far.csv")
        assert flagged.num_unlike > 100 and flagged.note is None
        usual = predict(out / "deep-ensemble.safetensors", table).num_unlike
        found.append((row.metrics["ood_auroc"], usual))
    areas, usual = zip(*found, strict=True)
    assert areas == pytest.approx([areas[0]] * 3, abs=5e-3)  # rounding swaps a few pairs of 2,304 that nearly tie
    assert max(usual) < 60 and max(usual) - min(usual) <= 1  # rounding may decide on a row at the limit


def test_numbers_of_words_are_checked(tmp_path):
    reader = RowReader(columns=(), fill=(), scaling=None, shape=(4,), unit=False, target="y")
    for values, right in (([[3, 0, 1, 2]], True), ([[3.0, 0, 1, 2]], True), ([[-1, 0, 1, 2]], False)):
        np.savez(tmp_path / "new.npz", words=np.array(values), y=np.zeros(1))
        if right:
            inputs, told = reader.read(tmp_path / "new.npz")
            assert inputs.tolist() == [[3, 0, 1, 2]] and inputs.dtype == torch.int64
            assert told == ["not used, for it is what is predicted: y"]
        else:
            with pytest.raises(DataError, match="numbers of words, whole and from 0 on"):
                reader.read(tmp_path / "new.npz")
    np.savez(tmp_path / "new.npz", words=np.full((1, 4), 1.5))
    with pytest.raises(DataError, match="numbers of words"):
        reader.read(tmp_path / "new.npz")
    network = Network(name="imdb_lstm", arguments={"vocabulary": 40}, input_shape=(4,), num_outputs=1)
    _check_words(torch.tensor([[39, 0]]), network, "new.npz")
    with pytest.raises(DataError, match=r"words in new.npz must have numbers below 40, as in training, got 40"):
        _check_words(torch.tensor([[40, 0]]), network, "new.npz")


def test_a_table_of_pixels_is_read_as_images(tmp_path):
    scaling = Scaling(torch.full((1, 1, 1), 0.25), torch.full((1, 1, 1), 0.5))
    reader = RowReader(columns=(), fill=(), scaling=scaling, shape=(1, 2, 3), unit=True, target="digit")
    images = np.random.default_rng(0).integers(0, 256, (4, 1, 2, 3))
    names = [f"pixel{number}" for number in range(6)]
    pandas.DataFrame(images.reshape(4, 6), columns=names).assign(digit=7).to_csv(tmp_path / "new.csv", index=False)
    inputs, told = reader.read(tmp_path / "new.csv")
    torch.testing.assert_close(inputs, torch.tensor((images / 255 - 0.25) / 0.5, dtype=torch.float32))
    assert told == ["not used, for it is what is predicted: digit", "each row read as [1, 2, 3], last axis fastest"]
    for wrong, said in (
        ({"more": [0] * 4}, "must have 6 columns of numbers.*got 7 columns, numbers"),
        ({"pixel5": ["a"] * 4}, "got 6 columns, not all of numbers"),
        ({"pixel5": [0.0, 1.0, np.nan, 2.0]}, "must hold finite numbers"),
    ):
        pandas.DataFrame(images.reshape(4, 6), columns=names).assign(**wrong).to_csv(tmp_path / "bad.csv", index=False)
        with pytest.raises(DataError, match=said):
            reader.read(tmp_path / "bad.csv")


def test_the_target_among_new_rows_is_told_apart(houses):
    folder, _, _ = houses
    found = predict(folder / "out" / "map.safetensors", folder / "prices.csv")
    assert found.differences == ("not used, for it is what is predicted: price",)


def test_networks_of_ones_own_must_be_given_again(tmp_path, monkeypatch):
    (tmp_path / "predict_nets.py").write_text("import torch\ndef make():\n    return torch.nn.Linear(13, 3)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    compare(quick("wine", model="predict_nets:make", held_out=0), ["map"], out=tmp_path / "out")
    np.savez(tmp_path / "new.npz", x=np.zeros((2, 13)))
    path = tmp_path / "out" / "map.safetensors"
    with pytest.raises(ConfigError, match="give it with --model predict_nets:make"):
        predict(path, tmp_path / "new.npz")
    assert len(predict(path, tmp_path / "new.npz", model="predict_nets:make").columns["label"]) == 2


def test_what_cannot_be_read_is_named(houses, tmp_path):
    folder, _, _ = houses
    path = folder / "out" / "map.safetensors"
    with pytest.raises(StorageError, match=r"absent.safetensors does not exist; give a posterior"):
        predict(folder / "absent.safetensors", folder / "prices.csv")
    with pytest.raises(StorageError, match=r"results.json is no .safetensors file; give a posterior"):
        predict(folder / "out" / "results.json", folder / "prices.csv")
    (tmp_path / "map.safetensors").write_bytes(path.read_bytes())
    with pytest.raises(StorageError, match=r"beside task.json and map.json"):
        predict(tmp_path / "map.safetensors", folder / "prices.csv")
    with pytest.raises(ConfigError, match="leave --model out"):
        predict(path, folder / "prices.csv", model="some:thing")
    with pytest.raises(DataError, match=r"there is no file .*absent.csv; give new rows as a .csv"):
        predict(path, tmp_path / "absent.csv")
    np.savez(tmp_path / "new.npz", x=np.zeros((2, 2, 2)))
    with pytest.raises(DataError, match=r"must hold one array of inputs \[N, 3\]"):
        predict(path, tmp_path / "new.npz")


def test_a_posterior_is_exported_with_the_scaling_of_the_table_inside(houses, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    folder, _, _ = houses
    posterior, graph = folder / "out" / "mc-dropout.safetensors", tmp_path / "houses.onnx"
    assert main(["export", str(posterior), str(graph)]) == 0
    rows = folder / "prices.csv"
    reader = saved(posterior)[0]["reader"]
    raw = reader.scaling.undo(reader.read(rows)[0].double()).numpy()  # in the table's own units
    session = onnxruntime.InferenceSession(graph)
    mean, std = session.run(["mean", "std"], {session.get_inputs()[0].name: raw[:7]})
    columns = predict(posterior, rows).columns
    for answer, name in ((mean, "mean"), (std, "std")):
        np.testing.assert_allclose(answer.ravel(), columns[name][:7], rtol=1e-4)
    described = json.loads(graph.with_suffix(".json").read_text())
    assert described["target"] == "price" and "area" in json.dumps(described["inputs"])


def test_a_graph_names_every_input_of_every_kind_of_column(tmp_path):
    """Numbers, categories and dates, with gaps and without."""
    days = pandas.date_range("2020-01-01", periods=60, freq="31h")
    frame = pandas.DataFrame({"x": np.arange(60) ** 2.0, "when": days, "city": ["Rome", "Oslo", "Lima"] * 20})
    whole = frame.assign(then=frame.when.where(frame.x > 9), town=frame.city.where(frame.x > 9), y=-frame.x)
    whole.to_csv(tmp_path / "own.csv", index=False)
    data = load(tmp_path / "own.csv", target="y")
    features = columns(RowReader.of(data))["features"]
    assert tuple(feature["name"] for feature in features) == data.feature_names
    told = {feature["name"]: feature["category"] for feature in features}
    assert (told["x"], told["when: Mon"], told["then is missing"]) == (None, None, "(missing)")
    assert (told["city=Rome"], told["town is missing"]) == ("Rome", "(missing)")


def test_a_column_that_is_not_used_may_hold_anything(tmp_path):
    names = [f"name {number}" for number in range(60)]
    frame = pandas.DataFrame({"x": np.arange(60) / 3, "y": np.arange(60) / 7, "who": names})
    frame.to_csv(tmp_path / "own.csv", index=False)
    reader = RowReader.of(load(tmp_path / "own.csv", target="y"))
    dates = ("03/04/2020", "2020-01-01", "")
    lines = "".join(f"{row},{date},{date}\n" for row, date in enumerate(dates))
    (tmp_path / "new.csv").write_text(f"x,when,who\n{lines}")
    inputs, told = reader.read(tmp_path / "new.csv")
    assert len(inputs) == 3 and told[-1] == "not used, for training did not have it: when"


def test_true_and_false_are_told_from_what_is_neither(tmp_path):
    rows = "".join(f"{bool(row % 2)},{row},{row / 3}\n" for row in range(20))
    (tmp_path / "own.csv").write_text(f"flag,x,y\n{rows}")
    reader = RowReader.from_json(json.loads(json.dumps(RowReader.of(load(tmp_path / "own.csv", target="y")).to_json())))
    new = tmp_path / "new.csv"
    new.write_text("flag,x\nTrue,1\nmaybe,2\n")
    with pytest.raises(DataError, match=r"'flag' of .* must hold True and False, as in training, got 'maybe' in row 2"):
        reader.read(new)
    found = []
    for flags in (("True", "False"), ("TRUE", "false"), ("1", "0"), (" true", "False,,")):
        new.write_text(f"flag,x\n{flags[0]},1\n{flags[1][:5]},1\n" + ",1\n" * (len(flags[1]) > 5))
        found.append(reader.read(new)[0][:2, 0].tolist())
    assert found[0][0] > found[0][1] and found == [found[0]] * 4
