"""Output on a terminal: colours, widths, progress with the compiler's pass, completion."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest

from partc.cli import terminal
from partc.cli.main import main
from partc.running import running, what_runs
from tests.patience import patience


class Screen(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_colours_are_for_terminals_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert terminal.coloured("PTC080", "red", Screen()) == "\x1b[31mPTC080\x1b[0m"
    assert terminal.coloured("PTC080", "red", io.StringIO()) == "PTC080"
    monkeypatch.setenv("NO_COLOR", "1")
    assert terminal.coloured("PTC080", "red", Screen()) == "PTC080"


def test_lines_are_cut_to_the_width() -> None:
    assert terminal.shortened(["12345", "123456"], 5) == ["12345", "12..."]


def test_the_width_is_that_of_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "72")
    assert terminal.columns() == 72


def test_what_runs_is_the_outermost_and_the_innermost() -> None:
    assert what_runs() == ""
    with running("choose_plan"):
        assert what_runs() == "choose_plan"
        with running("place_on_mesh"), running("propagate"):
            assert what_runs() == "choose_plan: propagate"
    assert what_runs() == ""


def test_progress_names_the_pass_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(terminal, "REDRAW_S", 0.01)
    monkeypatch.setenv("TERM", "xterm")
    with terminal.progress("compiling"), running("propagate"):
        end = time.monotonic() + patience(10)
        while "propagate" not in screen.getvalue() and time.monotonic() < end:
            time.sleep(0.01)
    shown = screen.getvalue()
    assert "propagate" in shown
    assert shown.count("\n") == 1  # the last state stays
    assert shown.rpartition("\x1b[K")[2].startswith("compiling")


def test_progress_is_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.progress("compiling"):
        pass
    assert capsys.readouterr().err == "compiling ...\n"


def test_errors_are_coloured_on_a_terminal() -> None:
    """All of the command line behind a pseudo terminal, as a person sees it."""
    for no_color, expected in (("", b"\x1b[31mPTC060\x1b[0m"), ("1", b"PTC060")):
        ours, theirs = pty.openpty()
        environment = {**os.environ, "NO_COLOR": no_color, "TERM": "xterm"}
        command = [sys.executable, "-m", "partc", "explain", "no folder"]
        ran = subprocess.run(command, stderr=theirs, timeout=patience(), env=environment)
        os.close(theirs)
        said = os.read(ours, 4096)
        os.close(ours)
        assert ran.returncode == 2
        assert said.startswith(expected)


@pytest.mark.skipif(find_spec("shtab") is None, reason="shtab writes the scripts")
@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_a_shell_completes_commands_and_options(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(word in script for word in ("explain", "simulate"))
    assert shell == "tcsh" or all(word in script for word in ("--microbatches", "--svg"))
    if shell == "bash":
        ran = subprocess.run(["bash", "-n"], input=script, text=True, timeout=patience())
        assert ran.returncode == 0


def test_completion_without_shtab_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert "pip install shtab" in capsys.readouterr().err
