"""Files of tables as pandas frames, whose headings are words that differ."""

from collections import Counter
from pathlib import Path
from typing import Any

from dubito.errors import ConfigError, DataError, StorageError, require_extra


def frame(path: Path) -> Any:
    """A .csv, .csv.gz or .parquet file as a pandas frame with words for headings."""
    pandas = require_extra("pandas", "tabular", f"reading {path}")
    csv = path.name.lower().endswith((".csv", ".csv.gz"))
    try:
        table = pandas.read_csv(path, low_memory=False) if csv else pandas.read_parquet(path)
        headings = _headings(path) if csv else [str(name) for name in table.columns]
    except ImportError as error:
        raise ConfigError(
            f"reading {path} needs pyarrow, which is not installed: pip install 'dubito[tabular]'"
        ) from error
    except UnicodeDecodeError as error:
        raise StorageError(f"{path} must be text in UTF-8, got other bytes ({error}); save it so") from error
    except (ValueError, OSError) as error:  # pandas' parser errors are ValueErrors, pyarrow's too
        raise StorageError(
            f"{path} should be a {path.suffix[1:]} table, reading it failed: {error}"
        ) from error
    if csv and len(headings) == 1 and set(headings[0]) & set(";\t|"):
        raise DataError(
            f"{path} must be separated by commas, but its only heading is {headings[0]!r}; save it so"
        )
    twice = tuple(name for name, count in Counter(headings).items() if count > 1 and name)
    if twice and not csv:
        raise DataError(f"{path} has several columns called {twice[0]!r}; rename all but one")
    table.columns = [
        str(column) for column in table.columns
    ]  # of a CSV file, pandas calls a second "a" "a.1"
    table = table.reset_index(drop=True)
    table.attrs["twice"] = twice
    return table


def _headings(path: Path) -> list[str]:
    """The headings of a CSV file as they stand there, where two may be the same."""
    import pandas

    first = pandas.read_csv(path, header=None, nrows=1, dtype=str, keep_default_na=False)
    return [str(name) for name in first.iloc[0]]
