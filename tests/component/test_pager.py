"""Long results on a terminal: a real process prints through a pager, which a user reads."""

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from daemon_stand_in.terminal import Terminal
from gpulease.cli.render import pager

LESS = ["less", "-FRX"]
Print = Callable[..., Terminal]
needs_less = pytest.mark.skipif(shutil.which("less") is None, reason="there is no less here")


def printing(lines: int, size: tuple[int, int] = (10, 40), **environment: str) -> Terminal:
    """Return a terminal on which a process prints so many lines."""
    code = (
        "from gpulease.cli.render import print_paged\n"
        f"print_paged(''.join(f'line {{n}}\\n' for n in range({lines})))\n"
        "print('after')"
    )
    return Terminal([sys.executable, "-c", code], size, **environment)


@pytest.fixture
def pages(tmp_path: Path) -> Iterator[str]:
    """Yield a pager that shows how much it got."""
    script = tmp_path / "pages"
    script.write_text("#!/bin/sh\necho PAGER $1 $(wc -l)\n")
    script.chmod(0o755)
    yield str(script)


def test_what_fits_on_the_terminal_starts_no_pager(pages: str) -> None:
    terminal = printing(9, PAGER=pages)
    assert terminal.finish() == 0
    assert "PAGER" not in terminal.shown
    assert "line 8" in terminal.shown


def test_what_does_not_fit_goes_to_the_pager_that_is_named(pages: str) -> None:
    terminal = printing(500, PAGER=f"{pages} -option")
    assert terminal.finish() == 0
    assert "PAGER -option 500" in terminal.shown
    assert "line 8" not in terminal.shown


@pytest.mark.parametrize(
    "environment", [{"PAGER": ""}, {"TERM": "dumb"}, {"PAGER": "/no/such/pager"}]
)
def test_without_a_pager_all_is_printed(environment: dict[str, str]) -> None:
    terminal = printing(500, **environment)
    assert terminal.finish() == 0
    assert "line 499" in terminal.shown


def test_a_terminal_of_unknown_size_has_no_pager(pages: str) -> None:
    terminal = printing(500, (0, 0), PAGER=pages)
    assert terminal.finish() == 0
    assert "line 499" in terminal.shown


@needs_less
def test_less_is_the_usual_pager_and_its_user_may_leave_early() -> None:
    terminal = printing(100_000)
    terminal.read_until("line 8")
    terminal.type(b"q")
    assert terminal.finish() == 0
    assert "line 99" not in terminal.shown
    assert terminal.shown.rstrip().endswith("after")
    assert terminal.after == terminal.found


@needs_less
def test_ctrl_c_is_for_the_pager() -> None:
    terminal = printing(100)
    terminal.read_until("line 8")
    terminal.type(b"\x03")
    # less drops what was typed before it noticed.
    terminal.until(lambda: terminal.type(b"G") or "line 99" in terminal.shown)
    terminal.type(b"q")
    assert terminal.finish() == 0
    assert terminal.shown.rstrip().endswith("after")


def test_which_pager_is_used() -> None:
    assert pager({"TERM": "xterm"}) == LESS
    assert pager({"TERM": "xterm", "PAGER": "more -s"}) == ["more", "-s"]
    assert pager({"TERM": "xterm", "PAGER": ""}) == []
    assert pager({"PAGER": "more"}) == []
