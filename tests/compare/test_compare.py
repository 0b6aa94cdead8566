"""The comparison on embedded data and on tables of one's own."""

import json
import os
import signal
import subprocess
import sys
import time
from html import escape
from io import StringIO
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from rich.console import Console

import dubito
from dubito import ConfigError, DataError, Training, jobs
from dubito.compare import Settings, compare
from dubito.compare import work as worker
from dubito.compare.evidence import JudgedPredictions, curve_of_training
from dubito.compare.evidence_real import decomposition_std, target_names
from dubito.compare.folder import Folder
from dubito.compare.live import Board, Writer
from dubito.compare.new_rows import RowReader
from dubito.compare.pictures import shown
from dubito.compare.settings import seconds_of
from dubito.compare.shift import shifted
from dubito.compare.table import table as tabulated
from dubito.compare.task import make_task
from dubito.compare.words import readable
from dubito.prediction import RealPrediction
from dubito.report import write_page
from dubito.training import Reached

QUICK = Training(iterations=40, batch_size=64, lr=5e-3)
SOURCE = Path(dubito.__file__).parent.parent


def quick(data, **options):
    return Settings(data=str(data), training=QUICK, num_samples=8, **options)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    out = tmp_path_factory.mktemp("digits")
    seen = []
    result = compare(quick("digits"), ["map", "mean-field"], out=out, report=seen.append)
    return out, result, seen


@pytest.fixture
def prices(tmp_path):
    """A table with words, gaps and a name in each row."""
    stream = np.random.default_rng(0)
    frame = pandas.DataFrame({"area": stream.normal(100, 20, 80), "city": stream.choice(["Rome", "Oslo"], 80)})
    frame["price"] = 2 * frame.area + 30 * (frame.city == "Oslo") + stream.normal(0, 5, 80)
    frame.loc[[3, 30], "area"] = np.nan
    frame.to_csv(tmp_path / "prices.csv", index=False)
    return tmp_path / "prices.csv", frame


def test_a_notebook_shows_the_table_and_the_verdict(digits):
    page = digits[1]._repr_html_()
    assert all(f">{name}</td>" in page for name in ("map", "mean-field")) and "<th" in page
    assert escape(digits[1].verdict[0]) in page and "[bold]" not in page and "<b>" in page


def test_results_posteriors_and_ranking(digits):
    out, result, seen = digits
    assert [row.method for row in seen] == ["map", "mean-field"]
    nll = [row.metrics["nll"] for row in result.rows]
    assert nll == sorted(nll) and result.held_out == ("8", "9")
    for row in result.rows:
        names = {"nll", "accuracy", "brier", "ece", "ood_auroc", "shift_nll", "surest_accuracy"}
        assert set(row.metrics) == names
        assert row.metrics["surest_accuracy"] > row.metrics["accuracy"]
        assert row.metrics["accuracy"] > 0.8 and row.metrics["ood_auroc"] > 0.6
        assert row.metrics["shift_nll"] > row.metrics["nll"]
        (fit,) = row.fits
        assert (fit.split, fit.steps, fit.ended, fit.shared_seconds) == (0, 40, "limit", 0)
        assert 0 < fit.seconds == pytest.approx(row.seconds) and fit.validation_nll is not None
    assert result.verdict[0].startswith(f"Take {result.rows[0].method}: its NLL on 290 test rows is ")
    saved = json.loads((out / "results.json").read_text())
    assert saved["verdict"] == list(result.verdict)
    assert [row["method"] for row in saved["rows"]] == [row.method for row in result.rows]
    assert saved["settings"]["training"]["iterations"] == 40
    task = make_task(quick("digits"))
    posterior = dubito.load(out / "map.safetensors", task.network.build(1))
    best = next(row for row in result.rows if row.method == "map")
    assert posterior.evaluate(task.test)["nll"] == pytest.approx(best.metrics["nll"])
    assert list((out / ".work").iterdir()) == []


def test_a_second_call_goes_on_and_other_settings_do_not_count(digits, monkeypatch):
    out, result, _ = digits
    monkeypatch.setattr(dubito.MAP, "fit_prepared", None)  # would fail, were it called
    again = compare(quick("digits"), ["map", "mean-field"], out=out)
    assert again.rows == result.rows and again.verdict == result.verdict
    other = compare(quick("digits", seed=1), ["map"], out=out)
    assert "not callable" in str(other.rows[0].failure)
    kept = Folder(out).result("map")
    assert kept is not None and kept.row == next(row for row in result.rows if row.method == "map")


def test_evidence_agrees_with_the_metrics(digits):
    out, result, _ = digits
    task = make_task(quick("digits"))
    for row in result.rows:
        kept = Folder(out).result(row.method)
        assert kept is not None
        found = kept.evidence
        for name in ("nll", "accuracy", "surest_accuracy", "ood_auroc", "shift_nll"):
            replicates = np.array(found["replicates"][name])
            # a bootstrap's mean is that of the rows, to its own Monte Carlo error; ranks are biased by ties of rows
            error = 5 * replicates.std() / np.sqrt(len(replicates)) + 0.1 * replicates.std()
            assert abs(replicates.mean() - row.metrics[name]) <= error, name
        assert sum(found["reliability"]["count"]) == len(task.test.targets)
        assert found["rejection"]["kept"][0] == pytest.approx(row.metrics["accuracy"], rel=1e-3)
        name, by_logits = found["roc"]
        assert (name, by_logits) == ("held-out 8, 9", "held-out 8, 9, by the variance of logits")
        assert (found["roc"][by_logits]["area"] == 0.5) == (row.method == "map")
        assert found["roc"][name]["area"] == pytest.approx(row.metrics["ood_auroc"], abs=1e-4)
        assert found["shifts"]["noise"]["nll"][0] == pytest.approx(row.metrics["nll"], rel=1e-3)
        for shares in found["histograms"]["entropy"]["shares"].values():
            assert sum(shares) == pytest.approx(1, abs=0.01)
        assert all(row["image"].startswith("data:image/png;base64,") for row in found["least_certain"])
        assert len(found["training"]["validation_nll"]) == len(found["training"]["epoch"])
    map_kept = Folder(out).result("map")
    assert map_kept is not None and map_kept.evidence["usual_epistemic"] == 0  # one network has no such uncertainty
    assert map_kept.evidence["usual_function_variance"] == 0


def test_networks_trained_one_after_the_other_share_one_curve():
    history = [
        {"epoch": epoch, "nll": member + 10 * epoch, "member": member} for member in (1, 2) for epoch in (0, 1, 2)
    ]
    assert curve_of_training(history) == {"epoch": [0, 1, 2], "nll": [1.5, 11.5, 21.5]}
    assert curve_of_training([]) == {}


def test_data_are_loaded_once_and_no_method_pays_for_the_first_training(monkeypatch):
    events = []
    made, fitted = make_task, dubito.MAP.fit_prepared
    monkeypatch.setattr(worker, "make_task", lambda settings: events.append("task") or made(settings))
    monkeypatch.setattr(worker, "warmed", lambda: events.append("warm"))
    monkeypatch.setattr("dubito.compare.plan.step_seconds", lambda settings, task: 0.01)
    monkeypatch.setattr(
        dubito.MAP, "fit_prepared", lambda *args, **options: events.append("fit") or fitted(*args, **options)
    )
    result = compare(quick("wine", seed=7), ["map", "mc-dropout"])
    assert [row.failure for row in result.rows] == [None, None]
    assert events == ["task", "warm", "fit", "warm"]


def test_held_out_classes_are_never_trained_on():
    task = make_task(quick("digits", held_out=3))
    assert task.held_out == ("7", "8", "9") and task.class_names == tuple("0123456")
    parts = (task.train, task.validation, task.test)
    assert all(part.targets.max() == 6 for part in parts)
    (others,) = task.ood.values()
    assert sum(len(part.targets) for part in parts) + len(others) == 1797
    with pytest.raises(ConfigError, match="at least 2 of the 10 classes must remain"):
        make_task(quick("digits", held_out=9))
    with pytest.raises(ConfigError, match="diabetes"):
        make_task(quick("diabetes", held_out=1))


def test_tables_of_ones_own_keep_all_their_classes(tmp_path):
    stream = np.random.default_rng(0)
    table = pandas.DataFrame(stream.normal(size=(90, 2)), columns=["a", "b"]).assign(y=[*"uvwxyz"] * 15)
    table.to_csv(tmp_path / "own.csv", index=False)
    for held_out in (None, 0, 2):
        task = make_task(quick(tmp_path / "own.csv", target="y", held_out=held_out))
        assert task.held_out == (("y", "z") if held_out else ())
        assert list(task.ood) == (["held-out y, z"] if held_out else ["shuffled", "far"])


def test_fewer_rows_to_train_on():
    whole, fewer, other = (
        make_task(quick("digits", rows=rows, seed=seed)) for rows, seed in ((None, 0), (40, 0), (40, 1))
    )
    assert len(fewer.train.targets) == 40 and len(fewer.test.targets) == len(whole.test.targets)
    rows = {tuple(row) for row in whole.train.inputs.tolist()}
    assert all(tuple(row) in rows for row in fewer.train.inputs.tolist())
    assert not torch.equal(fewer.train.inputs, other.train.inputs)
    assert torch.equal(fewer.train.inputs, make_task(quick("digits", rows=40)).train.inputs)
    with pytest.raises(ConfigError, match="rows must be a whole number of at least 8, got 3"):
        quick("digits", rows=3)


def test_laplace_is_judged_in_closed_form(tmp_path):
    (row,) = compare(quick("breast-cancer"), ["laplace-kfac"], out=tmp_path).rows
    task = make_task(quick("breast-cancer"))
    posterior = dubito.load(tmp_path / "laplace-kfac.safetensors", task.network.build())
    exact = posterior.evaluate(tuple(task.test), linearised=True)
    assert row.metrics["nll"] == pytest.approx(exact["nll"], rel=1e-5)
    assert "linearised=True" in row.settings
    assert exact["nll"] != posterior.evaluate(tuple(task.test), linearised=False)["nll"]


def test_regression_is_reported_in_original_units():
    result = compare(quick("diabetes"), ["map"])
    (row,) = result.rows
    task = make_task(quick("diabetes"))
    validation = tuple(task.validation)
    posterior = dubito.MAP().fit(
        task.network.build(0), task.train, task.likelihood, training=QUICK, validation=validation
    )
    prediction = posterior.predict(task.test.inputs).rescaled(*task.data.target_scaling)
    truth = task.data.target_scaling.undo(task.test.targets)
    rmse = (prediction.mean - truth).square().mean().sqrt()
    assert row.metrics["rmse"] == pytest.approx(float(rmse), rel=1e-5)
    assert row.metrics["nll"] == pytest.approx(-float(prediction.log_prob(truth).mean()), rel=1e-5)
    assert set(task.ood) == {"shuffled", "far"}


def test_parts_of_uncertainty_are_stored_in_each_targets_units():
    # Draws ±3 around the mean and noise of variance 16: std² = 5² = 4² + 3²; the second target is in thousandths.
    means = torch.tensor([[[2.0, 0.002]], [[8.0, 0.008]]]).expand(2, 3, 2)
    test = RealPrediction(means, torch.tensor([[[16.0, 16e-6]]]))
    far = RealPrediction(2 * means, torch.tensor([[[16.0, 16e-6]]]))
    seen = JudgedPredictions(test=test, targets=torch.zeros(3, 2), validation=test, ood={"far": far}, shifts={})
    assert decomposition_std(seen, "weight, width") == {
        "weight": {
            "test": {"aleatoric_std": [4.0] * 3, "epistemic_std": [3.0] * 3},
            "far": {"aleatoric_std": [4.0] * 3, "epistemic_std": [6.0] * 3},
        },
        "width": {
            "test": {"aleatoric_std": [0.004] * 3, "epistemic_std": [0.003] * 3},
            "far": {"aleatoric_std": [0.004] * 3, "epistemic_std": [0.006] * 3},
        },
    }
    assert target_names("y", 1) == ["y"] and target_names("y", 3) == ["0", "1", "2"]


@pytest.fixture(scope="module")
def diabetes(tmp_path_factory):
    out = tmp_path_factory.mktemp("diabetes")
    compare(quick("diabetes"), ["mc-dropout"], out=out)
    return out


def test_stored_parts_of_uncertainty_are_those_of_the_prediction(diabetes):
    task = make_task(quick("diabetes"))
    posterior = dubito.load(diabetes / "mc-dropout.safetensors", task.network.build())
    prediction = posterior.predict(task.test.inputs, num_samples=8, seed=0)
    prediction = prediction.rescaled(*task.data.target_scaling)
    result = Folder(diabetes).result("mc-dropout")
    assert result is not None and "decomposition" not in result.evidence
    parts = result.evidence["decomposition_std"]["progression"]["test"]
    assert len(task.test.targets) < 200  # so that all rows are stored
    three_digits = {"rel": 6e-3}
    assert parts["epistemic_std"] == pytest.approx(prediction.epistemic_std[:, 0].tolist(), **three_digits)
    assert parts["aleatoric_std"] == pytest.approx(prediction.aleatoric_std[:, 0].tolist(), **three_digits)
    squares = np.square(parts["aleatoric_std"]) + np.square(parts["epistemic_std"])
    assert np.sqrt(squares) == pytest.approx(prediction.std[:, 0].numpy(), **three_digits)
    for entry in result.evidence["least_certain"]:
        shown = prediction[entry["row"]]
        assert entry["epistemic_std"] == pytest.approx(float(shown.epistemic_std), **three_digits)
        assert entry["aleatoric_std"] == pytest.approx(float(shown.aleatoric_std), **three_digits)
        assert "epistemic" not in entry
    page = write_page(diabetes).read_text()
    assert "epistemic_std, the units of progression" in page and "on average over test rows</span>" in page
    assert f"<br>epistemic_std {readable(result.evidence['least_certain'][0]['epistemic_std'], 3)}</small>" in page


def test_folders_of_other_versions_are_refused(tmp_path):
    (tmp_path / "task.json").write_text('{"format": 2}')
    with pytest.raises(dubito.StorageError, match=r"task.json is not of format 4: another version .* anew"):
        Folder(tmp_path).read("task")


def test_a_table_of_ones_own(prices, tmp_path):
    path, _ = prices
    result = compare(quick(path, target="price"), ["mc-dropout"], out=tmp_path / "out")
    assert result.task == "regression: 'price' holds fractions"
    assert result.notes == ("area: 2 of 80 values missing, filled with the training rows' median and flagged",)
    kept = Folder(tmp_path / "out").result("mc-dropout")
    assert kept is not None
    assert len(kept.evidence["fan"]["x"]) == 16
    assert {"area", "city"} == set(kept.evidence["least_certain"][0]["values"])
    pandas.DataFrame({"area": [1.0, 2], "city": ["Rome", "Oslo"]}).to_csv(tmp_path / "far.csv", index=False)
    task = make_task(quick(path, target="price", ood=(str(tmp_path / "far.csv"),)))
    assert next(iter(task.ood.values())).shape == (2, 4)
    with pytest.raises(ConfigError, match="target and task are for tables of your own"):
        make_task(quick("wine", target="price"))
    with pytest.raises(DataError, match=r"must look like those of 'digits', of shape \[64\]; 'wine' does not"):
        make_task(quick("digits", ood=("wine",)))


def test_a_changed_table_is_trained_on_again(prices):
    path, frame = prices
    settings = quick(path, target="price")
    before = settings.digest(dubito.MAP())
    assert settings.digest(dubito.MAP()) == before
    frame.assign(price=frame.price + 1).to_csv(path, index=False)
    assert settings.digest(dubito.MAP()) != before
    assert settings.digest(dubito.MAP(prior_std=2.0)) != settings.digest(dubito.MAP())


def test_one_failing_method_does_not_stop_the_others(monkeypatch):
    def broken(*_args, **_kwargs):
        raise RuntimeError("no layer\nto treat")

    monkeypatch.setattr(dubito.MeanField, "fit_prepared", broken)
    result = compare(quick("wine"), ["mean-field", "map"])
    assert [row.method for row in result.rows] == ["map", "mean-field"]
    assert result.rows[1].failure == "RuntimeError: no layer to treat"


def test_out_of_distribution_rows_without_an_answer_are_left_out(tmp_path):
    stream = np.random.default_rng(0)
    table = pandas.DataFrame(stream.normal(size=(120, 2)), columns=["a", "b"])
    table["y"] = stream.poisson(np.exp(1 + table.a))
    table.to_csv(tmp_path / "own.csv", index=False)
    pandas.DataFrame({"a": [0.0, 1e6, 1.0], "b": 0.0}).to_csv(tmp_path / "huge.csv", index=False)
    huge = str(tmp_path / "huge.csv")
    settings = quick(tmp_path / "own.csv", target="y", likelihood="poisson", ood=(huge, "shuffled"), splits=(0, 1))
    result = compare(settings, ["map", "gradient-boosting"], out=tmp_path / "out")
    rows = {row.method: row for row in result.rows}
    assert rows["map"].failure is None and "ood_auroc" not in rows["map"].metrics and "nll" in rows["map"].metrics
    (note,) = {note for note in rows["map"].notes if "left out" in note}
    assert f"out-of-distribution rows {huge!r} are left out for this method" in note and "(rows 1)" in note
    assert "ood_auroc" in rows["gradient-boosting"].metrics
    kept = Folder(tmp_path / "out").result("map")
    assert kept is not None and set(kept.evidence["roc"]) == {"shuffled"}
    assert "ood_auroc" not in kept.evidence["replicates"]
    console = Console(file=StringIO(), width=200)
    console.print(tabulated(result))
    assert " – " in console.file.getvalue()
    assert ">–</td>" in write_page(tmp_path / "out").read_text()


def test_unknown_methods_are_named_before_work_starts():
    with pytest.raises(dubito.UnknownNameError, match="did you mean 'mean-field'"):
        compare("digits", ["map", "meanfield"])


def test_global_random_state_is_left_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    compare(quick("wine"), ["map"])
    assert torch.equal(before, torch.get_rng_state())


FACTORY = """
import torch

def make(input_shape, num_outputs):
    return torch.nn.Sequential(torch.nn.Linear(input_shape[0], 8), torch.nn.Tanh(), torch.nn.Linear(8, num_outputs))

def fixed():
    return torch.nn.Linear(13, 3)

def wrong():
    return torch.nn.Linear(12, 3)

def number():
    return 3

def broken(num_outputs):
    raise ValueError("no such layer")

def needy(width, seed):
    return torch.nn.Linear(width, 3)
"""


def test_networks_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "own_nets.py").write_text(FACTORY)
    (tmp_path / "torn_nets.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    result = compare(quick("wine", model="own_nets:make", held_out=0), ["map"], out=tmp_path / "out")
    assert result.rows[0].num_parameters == 13 * 8 + 8 + 8 * 3 + 3
    stored = json.loads((tmp_path / "out" / "task.json").read_text())["network"]
    assert stored["factory"] == "own_nets:make" and stored["name"] is None
    first, again, other = (make_task(quick("wine", model="own_nets:make")).network.build(seed) for seed in (0, 0, 1))
    assert torch.equal(first[0].weight, again[0].weight) and not torch.equal(first[0].weight, other[0].weight)
    for model, message in {
        "own_nets": "named like package.module:factory",
        "own_nets:absent": "no function 'absent'; it has make, fixed, wrong, number, broken, needy",
        "nowhere_at_all:make": "cannot import 'nowhere_at_all'",
        "own_nets:number": "must return an nn.Module, got int",
        "own_nets:wrong": "cannot read inputs of shape",
        "own_nets:broken": "own_nets:broken must return .* called with num_outputs=3, but raised ValueError: no such",
        "own_nets:needy": "called with seed=0, but raised TypeError: .*'width'; it may ask for input_shape, num_out",
        "torn_nets:make": "cannot import 'torn_nets' of --model torn_nets:make: ZeroDivisionError",
    }.items():
        with pytest.raises((ConfigError, DataError), match=message):
            compare(quick("wine", model=model, held_out=0), ["map"])


def test_defaults_suit_images_sequences_and_words(tmp_path):
    stream = np.random.default_rng(0)
    for name, inputs, network in (
        ("images", stream.random((20, 1, 8, 8)), "lenet"),
        ("series", stream.random((20, 5, 3)), "clinical_lstm"),
        ("strips", stream.random((20, 1, 8, 4)), "mlp"),
    ):
        np.savez(tmp_path / f"{name}.npz", x=inputs, y=np.arange(20) % 2)
        task = make_task(quick(tmp_path / f"{name}.npz", target="y"))
        assert task.network.name == network
        assert task.network.build()(task.train.inputs).shape == (len(task.train.inputs), 1)


def test_predictions_that_are_not_numbers_are_a_failure(monkeypatch):
    monkeypatch.setattr(worker, "metrics_of", lambda seen: {"nll": float("nan")})
    result = compare(quick("wine"), ["map"])
    assert result.rows[0].failure == ("its predictions are not numbers: training diverged; try a smaller --lr")


def test_shifts_and_pictures_of_images_of_ones_own(tmp_path):
    stream = np.random.default_rng(0)
    images, targets = stream.integers(0, 256, (30, 1, 8, 8), dtype=np.uint8), np.arange(30) % 3
    for kind, found in (("uint8", images), ("float32", images / 255), ("far", images.astype("float32"))):
        np.savez(tmp_path / f"{kind}.npz", x=found, y=targets)
    tasks = {
        kind: make_task(quick(tmp_path / f"{kind}.npz", target="y", corrupt=True))
        for kind in ("uint8", "float32", "far")
    }
    names = {kind: {name for name, *_ in shifted(task, quick("wine"))} for kind, task in tasks.items()}
    assert len(names["uint8"]) == len(names["float32"]) == 15 and names["far"] == {"noise"}
    bytes_, fractions = (tasks[kind].data.input_scaling.undo(tasks[kind].test.inputs) for kind in ("uint8", "float32"))
    torch.testing.assert_close(bytes_, fractions)
    assert len({shown(task, 0)["image"] for task in tasks.values()}) <= 2  # rounding apart, the same picture
    for kind, told in (("uint8", True), ("float32", True), ("far", False)):
        reader = RowReader.from_json(json.loads(json.dumps(RowReader.of(tasks[kind].data).to_json())))
        assert reader.unit is told
        for name in ("uint8", "float32") if told else ("far",):
            np.savez(tmp_path / "new.npz", x=np.load(tmp_path / f"{name}.npz")["x"])
            inputs, _ = reader.read(tmp_path / "new.npz")
            original = tasks[kind].data.input_scaling.undo(inputs).numpy()
            np.testing.assert_allclose(original, images / 255 if told else images, atol=1e-3)
    np.savez(tmp_path / "new.npz", x=images.astype("float32"))
    with pytest.raises(DataError, match="whole numbers from 0 to 255 or fractions from 0 to 1"):
        RowReader.of(tasks["uint8"].data).read(tmp_path / "new.npz")


def test_budgets():
    assert [seconds_of(text) for text in ("90s", "10m", "1.5h", " 2 M ")] == [90, 600, 5400, 120]
    for text in ("10", "m", "0s", "3x", "-1m"):
        with pytest.raises(ConfigError, match="a budget must be a time"):
            seconds_of(text)


def test_jobs_in_parallel_give_the_same_numbers(digits, tmp_path):
    _, result, _ = digits
    other = compare(quick("digits"), ["map", "mean-field"], out=tmp_path, jobs=2)
    assert {row.method: row.metrics for row in other.rows} == {row.method: row.metrics for row in result.rows}


def test_ctrl_c_keeps_what_is_finished(tmp_path):
    code = (
        "import signal\nfrom pathlib import Path\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # shells take it from jobs in the background
        "from dubito import Training\nfrom dubito.compare import Settings, compare\n"
        f"settings = Settings(data='wine', training=Training(iterations=20000, batch_size=64))\n"
        f"compare(settings, ['map', 'mean-field'], out=Path({str(tmp_path)!r}))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True)
    progress = tmp_path / ".work" / "map.progress"
    try:
        end = time.monotonic() + 300  # imports alone take a minute on a busy machine
        while not progress.is_file() and run.poll() is None and time.monotonic() < end:
            time.sleep(0.1)
        assert progress.is_file(), "the run never began"
        run.send_signal(signal.SIGINT)
        _, error = run.communicate(timeout=120)
    finally:
        run.kill()  # whatever happened, nothing is left running
        run.wait()
    assert "interrupted after 0 of 2 fits" in error and "the same command goes on" in error
    assert list((tmp_path / ".work").glob("map@*.ckpt"))  # training goes on from here


def test_a_process_that_dies_is_a_failure_like_any_other(tmp_path, monkeypatch):
    """The pool dies with its first job; tried again one by one, `swa` dies and `map` does not."""
    (death,) = jobs.worker_deaths()

    def deadly(function, arguments, **_options):
        if len(arguments) > 1 or "swa" in arguments[0]:
            raise death("A worker died.\n\nThe exit codes of the workers are {SIGKILL(-9)}\nAnd so on.")
        yield from (function(*one) for one in arguments)

    monkeypatch.setattr(jobs, "each", deadly)
    result = compare(quick("wine"), ["swa", "map"], out=tmp_path, jobs=2)
    assert [row.method for row in result.rows] == ["map", "swa"]
    assert result.rows[0].failure is None
    assert result.rows[1].failure == "its process died (SIGKILL(-9)), perhaps for want of memory"


def test_the_board_follows_all_jobs(tmp_path):
    console = Console(file=StringIO(), force_terminal=True, width=100)
    paths = {(name, 0): Folder(tmp_path).work(name, "progress") for name in ("map", "rank1", "swag")}
    board = Board(paths, console)
    with board.open():
        Writer(paths["map", 0])(Reached("MAP", 30, 120, 0.25))
        paths["rank1", 0].write_text('{"half')
        for _ in range(100):
            time.sleep(0.05)
            if board.progress.tasks[0].completed == 30:
                break
        states = [task.fields["state"] for task in board.progress.tasks]
        assert states == ["step 30, nll 0.25", "waiting", "waiting"]
        board.ended(("swag", 0), failed=True)
        board.ended(("map", 0), failed=False)
    assert [task.fields["state"] for task in board.progress.tasks] == ["[green]done", "waiting", "[red]failed"]
    assert board.progress.tasks[0].percentage == 100
    many = Board({("map", split): tmp_path / "none" for split in (0, 3)}, console).progress.tasks
    assert [(task.description, task.visible) for task in many] == [("map, split 0", False), ("map, split 3", False)]
