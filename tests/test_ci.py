"""CI's script fetches a browser where it can, and runs the tests whatever becomes of that."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / ".ci" / "run"
pytestmark = pytest.mark.skipif(
    os.name != "posix" or shutil.which("timeout") is None, reason="CI runs on Debian: needs bash and timeout"
)


@pytest.fixture
def machine(tmp_path):
    """A machine with nothing but what a shell needs; programs of one line each can be added."""
    # Two folders: a file written where a link to the machine's own program stands would overwrite that program.
    programs, links = tmp_path / "programs", tmp_path / "links"
    programs.mkdir()
    links.mkdir()
    for name in ("bash", "dirname", "env", "sleep", "timeout"):
        (links / name).symlink_to(str(shutil.which(name)))

    def add(name, line):
        path = programs / name
        path.write_text(f'#!{shutil.which("bash")}\n{line}\necho "{name} $*" >>"{tmp_path}/calls"\n')
        path.chmod(0o755)

    def run(**environment):
        environment["PATH"] = f"{programs}:{links}"
        done = subprocess.run([str(SCRIPT)], env=environment, capture_output=True, text=True)
        calls = tmp_path / "calls"
        return done, calls.read_text().splitlines() if calls.is_file() else []

    add("id", "echo 0; exit")
    add("make", "")
    return add, run


def test_a_browser_that_is_there_is_not_fetched(machine):
    add, run = machine
    add("apt-get", "")
    add("google-chrome", "")
    done, calls = run()
    assert done.returncode == 0 and calls == ["make test"]


def test_a_missing_browser_is_fetched_first(machine):
    add, run = machine
    add("apt-get", "")
    done, calls = run()
    assert done.returncode == 0, done.stderr
    assert [call.split()[-1] for call in calls] == ["update", "chromium", "test"]
    assert "install --yes --no-install-recommends chromium" in calls[1]


def test_others_than_root_ask_sudo_without_a_password(machine):
    add, run = machine
    add("id", "echo 1000; exit")
    add("apt-get", "")
    add("sudo", 'test "$1" = -n; shift; "$@"')
    done, calls = run()
    assert done.returncode == 0, done.stderr
    assert [call.split()[0] for call in calls] == ["apt-get", "sudo", "apt-get", "sudo", "make"]


@pytest.mark.parametrize("user", [0, 1000])  # the second has no sudo
def test_an_installation_that_fails_stops_nothing(machine, user):
    add, run = machine
    add("id", f"echo {user}; exit")
    add("apt-get", "exit 100")
    done, calls = run()
    assert done.returncode == 0 and calls == ["make test"]
    assert "chromium could not be installed; the tests that need it are skipped" in done.stderr


def test_an_installation_that_hangs_is_given_up(machine):
    add, run = machine
    add("apt-get", "sleep 60")
    start = time.monotonic()
    done, calls = run(DUBITO_INSTALL_SECONDS="0.2")
    assert done.returncode == 0 and calls == ["make test"] and time.monotonic() - start < 30


def test_without_apt_the_tests_run_at_once(machine):
    _, run = machine
    done, calls = run()
    assert done.returncode == 0 and calls == ["make test"] and done.stderr == ""


def test_a_suite_that_fails_fails_the_run(machine):
    add, run = machine
    add("make", "exit 2")
    assert run()[0].returncode == 2
