"""TensorBoard, CSV files and Optuna, each read back by the library itself."""

import csv
import sys

import pytest
import torch

import dubito
from dubito import MAP, Categorical, ConfigError, DeepEnsemble, Interrupted, StorageError, Training
from dubito.integrations import CSV, OptunaPruning, TensorBoard
from tests.training.examples import data, mlp
from tests.training.test_training_callbacks import Heard, Stopping

TRAINING = Training(iterations=6, batch_size=9, lr=1e-2)
GIVEN = {"training": TRAINING, "validation": data(12)}


def scalars(folder) -> dict[str, dict[int, float]]:
    """What TensorBoard itself reads from a folder."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder)).Reload()
    return {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def rows(path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_tensorboard_reads_the_terms_of_all_steps_and_validations(tmp_path):
    pytest.importorskip("tensorboard")
    heard = Heard()
    posterior = MAP().fit(mlp(), data(), Categorical(), callbacks=[TensorBoard(tmp_path), heard], **GIVEN)
    seen = scalars(tmp_path)
    assert sorted(seen) == ["train/kl", "train/loss", "train/lr", "train/nll", "validation/nll"]
    assert seen["train/nll"] == pytest.approx({n + 1: terms["nll"] for n, terms in enumerate(heard.terms)})
    truth = {int(entry["step"]): entry["validation_nll"] for entry in posterior.history}
    assert seen["validation/nll"] == pytest.approx(truth)


def test_tensorboard_has_members_apart_and_a_resumed_run_in_one_piece(tmp_path):
    pytest.importorskip("tensorboard")
    DeepEnsemble(members=2).fit(mlp(), data(), Categorical(), callbacks=[TensorBoard(tmp_path, every=3)], **GIVEN)
    for member in range(2):
        assert sorted(scalars(tmp_path / f"member-{member}")["train/loss"]) == [3, 6]
    folder, given = tmp_path / "resumed", {**GIVEN, "checkpoint": tmp_path / "c"}
    with pytest.raises(Interrupted):
        MAP().fit(mlp(), data(), Categorical(), callbacks=[TensorBoard(folder), Stopping(2)], **given)
    MAP().fit(mlp(), data(), Categorical(), callbacks=[TensorBoard(folder)], **given)
    assert sorted(scalars(folder)["train/loss"]) == [1, 2, 3, 4, 5, 6]


def test_csv_holds_every_event_in_order(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("of another run\n")
    posterior = MAP().fit(mlp(), data(), Categorical(), callbacks=[CSV(path)], **GIVEN)
    table = rows(path)
    events = [(row["event"], int(row["step"])) for row in table]
    steps = [("step", n) for n in range(1, 7)]
    assert events == [*steps[:3], ("validation", 3), ("epoch", 3), *steps[3:], ("validation", 6), ("epoch", 6)]
    last = table[-1]
    assert {"run": last["run"], "member": last["member"]} == {"run": "MAP", "member": ""}
    assert float(last["nll"]) == posterior.history[-1]["nll"] and int(last["epoch"]) == 2


@pytest.mark.parametrize("method", [MAP(), DeepEnsemble(members=2)], ids=repr)
def test_a_resumed_csv_has_every_row_once_also_those_written_after_the_last_save(method, tmp_path):
    path, whole, given = tmp_path / "log.csv", tmp_path / "whole.csv", {**GIVEN, "checkpoint": tmp_path / "c"}
    method.fit(mlp(), data(), Categorical(), callbacks=[CSV(whole)], **GIVEN)
    with pytest.raises(Interrupted):
        method.fit(mlp(), data(), Categorical(), callbacks=[CSV(path), Stopping(2)], **given)
    title, member = rows(path)[0]["run"], rows(path)[0]["member"]
    with path.open("a") as file:  # as a killed run leaves it
        file.write(f"{title},{member},step,5,,9.0,9.0,9.0,9.0,\n")
    method.fit(mlp(), data(), Categorical(), callbacks=[CSV(path)], **given)
    order = ("run", "member", "step", "event")
    tables = [sorted(rows(p), key=lambda row: [row[name] for name in order]) for p in (path, whole)]
    assert tables[0] == tables[1]


def test_a_csv_that_cannot_be_written_is_refused_before_work_starts(tmp_path):
    heard = Heard()
    with pytest.raises(StorageError, match="cannot be written"):
        MAP().fit(mlp(), data(), Categorical(), callbacks=[CSV(tmp_path / "no" / "log.csv"), heard], **GIVEN)
    assert not heard.events
    with pytest.raises(ConfigError, match="every must be a whole number"):
        CSV(tmp_path / "log.csv", every=0)


@pytest.mark.parametrize("method", [MAP(), DeepEnsemble(members=2)], ids=repr)
def test_optuna_prunes_trials_and_keeps_what_was_reported(method):
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    net, rates = mlp(), [1e-2, 1e-9]
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    ends = []

    def objective(trial) -> float:
        heard = Heard()
        training = Training(epochs=4, batch_size=9, lr=rates[trial.number])
        try:
            posterior = method.fit(
                net, data(), Categorical(), training=training, validation=data(12),
                callbacks=[OptunaPruning(trial), heard],
            )  # fmt: skip
        finally:
            ends.append(heard.events[-1][2])
        return posterior.history[-1]["validation_nll"]

    pruner = optuna.pruners.MedianPruner(n_startup_trials=1, n_warmup_steps=4)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(0), pruner=pruner)
    study.optimize(objective, n_trials=2)
    first, second = study.trials
    assert first.state.name == "COMPLETE" and second.state.name == "PRUNED" and ends == ["limit", "failed"]
    assert sorted(first.intermediate_values) == [3, 6, 9, 12]
    assert sorted(second.intermediate_values) == [3, 6]
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())


def test_optuna_needs_validation_rows():
    optuna = pytest.importorskip("optuna")
    study = optuna.create_study()
    callback = OptunaPruning(study.ask())
    with pytest.raises(ConfigError, match="pass validation="):
        MAP().fit(mlp(), data(), Categorical(), training=TRAINING, callbacks=[callback])


@pytest.mark.parametrize("package, make, extra", [
    ("tensorboard", lambda: TensorBoard("runs"), "tensorboard"),
    ("optuna", lambda: OptunaPruning(None), "tune"),
])  # fmt: skip
def test_a_missing_package_is_named_with_its_extra(package, make, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"needs {package}.*dubito\[{extra}\]"):
        make()


def test_names_are_opened_by_the_room():
    assert {"CSV", "OptunaPruning", "TensorBoard"} <= set(dir(dubito.integrations))
