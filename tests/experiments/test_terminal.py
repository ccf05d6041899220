from __future__ import annotations

import pytest

from lrmoe.experiments import terminal


def test_times_are_said_in_the_unit_that_fits() -> None:
    found = [terminal.duration(seconds) for seconds in (3, 100, 5400, 7300)]
    assert found == ["3 s", "2 min", "1 h 30 min", "2 h 02 min"]


def test_off_a_terminal_lines_are_not_broken_and_brackets_are_no_markup(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = "[bold]" + 100 * " word"
    for as_json in (False, True):
        terminal.say(terminal.open_console(as_json), text)
        out = capsys.readouterr()
        assert (out.out, out.err) == (("", text + "\n") if as_json else (text + "\n", ""))


def test_off_a_terminal_progress_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("lrmoe.experiments.terminal.time.monotonic", lambda: now[0])
    with terminal.progress_bar() as tell:
        for second in range(12):
            now[0] = float(second)
            tell("planning", second, 12)
    assert capsys.readouterr().err.splitlines() == ["5/12  planning", "10/12  planning"]
