"""The command line, in process."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import dubito
from dubito import allocator
from dubito.cli import main, make_parser

SOURCE = Path(dubito.__file__).parent.parent


def test_compare_prints_a_plan_a_verdict_a_table_and_paths(tmp_path, capsys):
    arguments = ["compare", "wine", "--methods", "map,mc-dropout", "--steps", "6", "--out", str(tmp_path)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    for text in (
        "wine: classification (the data set's own)",
        "network: mlp(",
        "2 methods × 1 split = 2 fits of at most 6 steps each",
        "expected: about ",
        "map: ",
        "Take m",
        "accuracy",
    ):
        assert text in printed
    assert f"page: {tmp_path / 'report.html'}" in printed
    assert {"map.safetensors", "results.json", "task.json", "report.html"} <= set(os.listdir(tmp_path))
    (tmp_path / "report.html").unlink()
    assert main(["report", str(tmp_path)]) == 0
    assert (tmp_path / "report.html").is_file()


def test_classes_that_are_held_out_are_named(tmp_path, capsys):
    arguments = ["compare", "wine", "--methods", "map", "--steps", "4", "--out", str(tmp_path)]
    assert main([*arguments, "--hold-out", "1"]) == 0
    assert "\nclasses held out, which no posterior can answer: " in capsys.readouterr().out
    assert main(arguments) == 0
    assert "classes held out" not in capsys.readouterr().out


def test_json_is_all_that_goes_to_standard_output(tmp_path, capsys):
    main(["compare", "wine", "--methods", "map", "--steps", "4", "--out", str(tmp_path), "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["rows"][0]["method"] == "map" and result["page"] == str(tmp_path / "report.html")


def test_a_method_that_fails_makes_the_exit_code_1(tmp_path, capsys, monkeypatch):
    def broken(*_args, **_kwargs):
        raise dubito.NetworkError("no [layer] to treat")

    monkeypatch.setattr(dubito.MeanField, "fit_prepared", broken)
    arguments = ["compare", "wine", "--methods", "mean-field,map", "--steps", "4", "--out", str(tmp_path)]
    assert main(arguments) == 1
    assert "mean-field: failed: no [layer] to treat" in capsys.readouterr().out


def test_lists(capsys):
    assert main(["methods"]) == 0
    assert "mc-dropout" in capsys.readouterr().out
    assert main(["methods", "--json"]) == 0
    listed = {row["name"]: row["settings"] for row in json.loads(capsys.readouterr().out)}
    assert listed["map"] == {"type": "MAP", "prior_std": None} and set(listed) == set(dubito.methods())
    assert main(["data", "list", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["digits"]["present"] and rows["digits"]["rows"] == 1797
    assert main(["reproduce", "--list", "--json"]) == 0
    tables = json.loads(capsys.readouterr().out)
    assert {"name", "scale", "jobs", "finished", "cpu_seconds", "title", "paper", "smaller"} == set(tables[0])


def test_errors_are_one_line_and_tracebacks_on_request(capsys, monkeypatch):
    assert main(["compare", "digits", "--methods", "nonsense"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("dubito: unknown method 'nonsense'") and error.count("\n") == 1
    for arguments in (["--debug", "compare"], ["compare", "--debug"]):
        with pytest.raises(KeyError, match="nonsense"):
            main([*arguments, "digits", "--methods", "nonsense"])
    for arguments in (["compare"], ["compare", "digits", "--budget", "1m", "--budget-per-method", "1m"]):
        with pytest.raises(SystemExit) as exit_code:
            main(arguments)
        assert exit_code.value.code == 2
    capsys.readouterr()

    def surprised(*_):
        raise ZeroDivisionError("division\nby zero")

    monkeypatch.setattr("dubito.cli.methods.run", surprised)
    assert main(["methods"]) == 1
    error = capsys.readouterr().err
    assert error == "dubito: this should not happen: ZeroDivisionError: division by zero; --debug shows where\n"

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("dubito.cli.methods.run", interrupted)
    assert main(["methods"]) == 130


def test_exit_codes_are_documented():
    text = " ".join(make_parser().format_help().split())
    assert "exit codes: 0 done; 1 an error" in text and "2 a wrong call; 130 interrupted" in text


@pytest.mark.parametrize(
    ("words", "prefix", "expected"),
    [
        (["compare"], "dig", {"digits"}),
        (["compare", "wine", "--methods"], "map,mean", {"map,mean-field"}),
        (["compare", "wine"], "--corr", {"--corrupt"}),
        (["reproduce"], "inf-table-3", {"inf-table-3"}),
    ],
)
def test_options_and_names_are_completed(words, prefix, expected):
    argcomplete = pytest.importorskip("argcomplete")
    finder = argcomplete.CompletionFinder(make_parser())
    found = finder._get_completions(["dubito", *words], prefix, "", None)
    assert {text.strip() for text in found} == expected


def test_a_shell_that_asks_is_answered(tmp_path):
    pytest.importorskip("argcomplete")
    out, line = tmp_path / "completions", "dubito pre"
    asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_STDOUT_FILENAME": str(out), "PYTHONPATH": str(SOURCE)}
    asked |= {"COMP_LINE": line, "COMP_POINT": str(len(line))}
    subprocess.run([sys.executable, "-m", "dubito"], env={**os.environ, **asked}, check=True)
    assert out.read_text().strip() == "predict"


def test_completion_prints_what_a_shell_needs(capsys, monkeypatch):
    pytest.importorskip("argcomplete")
    assert main(["completion", "bash"]) == 0
    assert "dubito" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    assert main(["completion", "zsh"]) == 1
    assert "pip install 'dubito[cli]'" in capsys.readouterr().err


def test_python_m_dubito_is_the_same():
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, "-m", "dubito", "--version"], env=environment, capture_output=True, text=True
    )
    assert done.stdout == f"dubito {dubito.__version__}\n" and done.returncode == 0


def test_the_allocator_takes_the_setting_or_says_no():
    assert allocator.keep_large_blocks() in (True, False)


def test_nothing_happens_off_linux(monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    assert allocator.keep_large_blocks() is False


def test_names_in_brackets_are_printed_as_they_are(tmp_path, capsys):
    table = tmp_path / "[red]own.csv"
    names = ("[bold]no[/]", "[/x]yes:cat:")
    rows = "".join(f"{row},{row % 5},{names[row % 2]}\n" for row in range(40))
    table.write_text(f"a[1],[blue]b,:cat:[/x]\n{rows}")
    out = tmp_path / "[out]"
    arguments = ["compare", str(table), "--target", ":cat:[/x]", "--methods", "map", "--steps", "4", "--out", str(out)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "':cat:[/x]' holds 2 different words" in printed and f"results and posteriors: {out}" in printed
    predictions = tmp_path / "[p].csv"
    arguments = ["predict", str(out / "map.safetensors"), str(table), "--keep", "all", "--out", str(predictions)]
    assert main(arguments) == 0
    assert f"40 rows: {predictions}" in capsys.readouterr().err
    header, first, *_ = predictions.read_text().splitlines()
    assert header.startswith("a[1],[blue]b,:cat:[/x],label,confidence,")
    assert first.startswith("0,0,[bold]no[/],") and "prob_[/x]yes" in header
    assert main([*arguments[:4], "a[2]"]) == 1
    assert "'a[2]', did you mean 'a[1]'?" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["-5m", "-.5h", "-3"])
def test_a_negative_budget_is_told_what_a_budget_is(value, capsys):
    assert main(["compare", "wine", "--budget", value]) == 1
    assert capsys.readouterr().err == f"dubito: a budget must be a time such as 90s, 10m or 1.5h, got {value!r}\n"


def test_warnings_are_one_line_without_a_path(monkeypatch, capsys):
    def warn(_options):
        warnings.warn("mind\n[this]", dubito.DubitoWarning, stacklevel=1)
        warnings.warn("and that", RuntimeWarning, stacklevel=1)

    monkeypatch.setattr("dubito.cli.methods.run", warn)
    before = warnings.showwarning
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert main(["methods"]) == 0
    assert capsys.readouterr().err == "dubito: mind [this]\ndubito: and that\n"
    assert warnings.showwarning is before


def test_folders_of_data_that_are_not_there_are_told(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("DUBITO_DATA", os.pathsep.join([str(tmp_path), str(tmp_path / "nowhere")]))
    assert main(["data", "list"]) == 0
    assert capsys.readouterr().out.count("which is no folder") == 1
