"""The command line, in process."""

import json

import pytest

from dubito import allocator
from dubito.cli import main


def test_compare_prints_a_table_and_writes_results(tmp_path, capsys):
    assert main(["compare", "wine", "--methods", "map", "--epochs", "3", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "accuracy" in printed and "map" in printed and str(tmp_path.name) in printed.replace("\n", "")
    assert (tmp_path / "map.safetensors").is_file() and (tmp_path / "results.json").is_file()


def test_json_is_all_that_goes_to_standard_output(tmp_path, capsys):
    main(["compare", "wine", "--methods", "map", "--epochs", "2", "--out", str(tmp_path), "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["rows"][0]["method"] == "map"


def test_methods_and_data_are_listed(capsys):
    assert main(["methods"]) == 0
    assert "mc-dropout" in capsys.readouterr().out
    assert main(["data", "list", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["digits"]["present"] and rows["digits"]["rows"] == 1797


def test_errors_are_one_line_and_tracebacks_on_request(capsys):
    assert main(["compare", "digits", "--methods", "nonsense"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("dubito: unknown method 'nonsense'") and "Traceback" not in error
    with pytest.raises(KeyError, match="nonsense"):
        main(["--debug", "compare", "digits", "--methods", "nonsense"])
    with pytest.raises(SystemExit) as exit_code:
        main(["compare"])
    assert exit_code.value.code == 2


def test_the_allocator_takes_the_setting_or_says_no():
    assert allocator.keep_large_blocks() in (True, False)


def test_nothing_happens_off_linux(monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    assert allocator.keep_large_blocks() is False
