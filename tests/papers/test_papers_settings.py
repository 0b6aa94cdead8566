"""Every setting of an experiment is named: the library's defaults may change, the papers' forms do not."""

import ast
import dataclasses
import inspect
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path

import pytest

import dubito
from dubito import BALI, Gaussian, MeanField, Rank1, Training, active, training
from dubito.errors import ConfigError
from dubito.loading import known_settings
from dubito.method import Method
from dubito.storage import encode
from papers import settings
from papers.runner import tables
from papers.settings import FROZEN, decisive, explicit

PAPERS = Path(settings.__file__).parent
SOURCES = sorted(PAPERS.rglob("*.py"))


@pytest.mark.parametrize("kind", FROZEN, ids=lambda kind: kind.__name__)
def test_every_field_is_named(kind):
    assert set(FROZEN[kind]) == {field.name for field in fields(kind)}
    given = {"epochs": 3} if kind is Training else {}  # a run has a length, and every experiment says which
    made = explicit(kind, **given)
    assert all(getattr(made, name) == value for name, value in {**FROZEN[kind], **given}.items())


def test_every_method_and_every_setting_of_training_is_there():
    kinds = {type(method) for method in dubito.methods().values()}
    named = [kind for kind in known_settings().values() if kind.__module__.startswith("dubito.")]
    kinds |= {kind for kind in named if not kind.__name__.startswith("Tempered")}
    for _, kind in inspect.getmembers(training, inspect.isclass):
        settles = is_dataclass(kind) and all(f.default is not dataclasses.MISSING for f in fields(kind))
        if settles and kind.__name__ != "Run":
            kinds.add(kind)
    assert kinds <= set(FROZEN), kinds - set(FROZEN)


def calls_with_defaults(text: str) -> list[str]:
    """Calls of settings' classes that leave a field to the library."""
    known = {kind.__name__: {field.name for field in fields(kind)} for kind in FROZEN}
    known |= {
        kind.__name__: {field.name for field in fields(kind)}
        for kind in (active.ActiveLearning, active.Selection, active.OutputVariance, active.Random)
    }
    calls = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name.startswith(("nn.", "torch.")) or name.rpartition(".")[2] not in known:
            continue
        if {keyword.arg for keyword in node.keywords} < known[name.rpartition(".")[2]]:
            calls.append(ast.unparse(node))
    return calls


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PAPERS)))
def test_no_experiment_leaves_a_setting_to_the_library(path):
    assert calls_with_defaults(path.read_text()) == []


def test_the_check_sees_defaults():
    assert calls_with_defaults("MAP()") == ["MAP()"]
    assert calls_with_defaults("dubito.MeanField(prior_std=1.0)") == ["dubito.MeanField(prior_std=1.0)"]
    assert calls_with_defaults("MCDropout(rate=0.1, prior_std=None)") == []
    assert calls_with_defaults("KFAC(); nn.Linear(3, 4); explicit(MAP)") == []
    assert calls_with_defaults("ActiveLearning(method=m, acquisition=a)") != []


def methods_in(value) -> list[Method]:
    """Methods anywhere in settings."""
    if isinstance(value, Method):
        return [value]
    if is_dataclass(value) and not isinstance(value, type):
        return [method for field in fields(value) for method in methods_in(getattr(value, field.name))]
    return []


def test_experiments_keep_their_forms_when_the_librarys_defaults_change(monkeypatch):
    """What a table's variants hold is what explicit() made, whatever a default becomes."""
    before = encode(explicit(Rank1))
    monkeypatch.setattr(Rank1, "__init__", changed_defaults(Rank1, components=9, kl="sum"))
    monkeypatch.setattr(BALI, "__init__", changed_defaults(BALI, step_size=0.9, output_floor=0.5))
    assert Rank1().components == 9  # the library's
    assert encode(explicit(Rank1)) == before
    assert explicit(BALI).step_size == 0.3
    assert explicit(BALI, step_size=1.0).output_floor is None


def changed_defaults(kind, **changes):
    plain = kind.__init__

    def init(self, **given):
        plain(self, **{**changes, **given})

    return init


def test_there_are_methods_to_look_at():
    kinds = {
        type(method)
        for table in tables().values()
        for scale in table.experiment.scales.values()
        for variant in scale.variants.values()
        for method in methods_in(variant.settings)
    }
    assert len(kinds) >= 10


def test_unnamed_and_unknown_settings_are_refused_with_a_remedy():
    @dataclass(frozen=True, kw_only=True)
    class New:
        field: int = 1

    with pytest.raises(ConfigError, match=r"New are not spelled out; add them to papers/settings.py"):
        explicit(New)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "FROZEN", {New: {}})
        with pytest.raises(ConfigError, match=r"does not name: field; add them to FROZEN, and to ADDED"):
            explicit(New)
        assert explicit(New, field=2).field == 2


def test_added_and_renamed_fields_leave_checksums_as_they_were(monkeypatch):
    before = {"type": "Rank1", "components": 4, "family": {"type": "Normal", "prior_std": 0.1}}
    after = {"type": "Rank1", "parts": 4, "new": None, "family": {"type": "Normal", "prior_std": 0.1, "new": 2}}
    assert decisive(before) == before
    monkeypatch.setattr(settings, "ADDED", {"Rank1": {"new": None}, "Normal": {"new": 1}})
    monkeypatch.setattr(settings, "RENAMED", {"Rank1": {"parts": "components"}})
    changed = decisive(after)
    assert changed == {**before, "family": {"type": "Normal", "prior_std": 0.1, "new": 2}}  # 2 changes something
    assert decisive([after])[0] == changed


def test_explicit_settings_are_the_papers_and_not_more():
    assert explicit(MeanField, prior_std=0.1) == MeanField(**{**FROZEN[MeanField], "prior_std": 0.1})
    assert explicit(Gaussian, std=2.0).std == 2.0
    with pytest.raises(TypeError):
        explicit(Gaussian, width=1.0)
