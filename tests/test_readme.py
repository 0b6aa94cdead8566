"""The README's first lines run as they stand."""

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_ten_line_start_runs(capsys):
    first = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL).group(1)
    exec(compile(first, "README.md", "exec"), {})
    assert "tensor" in capsys.readouterr().out
