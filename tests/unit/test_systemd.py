"""What systemd is told, and how the log looks in its journal."""

import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulease.daemon.main import JournalFormatter, goes_to_journal, levelled
from gpulease.daemon.systemd import REST_S, Notifier


class Manager:
    """A service manager's end of the conversation."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.path)
        self._socket.setblocking(False)

    def heard(self) -> list[list[str]]:
        messages = []
        while True:
            try:
                messages.append(self._socket.recv(4096).decode().split("\n"))
            except BlockingIOError:
                return messages

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    manager = Manager(tmp_path / "n")
    yield manager
    manager.close()


def test_each_pass_feeds_the_watchdog_and_news_are_told_once(manager: Manager) -> None:
    notifier = Notifier(manager.path, watchdog_s=60)
    notifier.ready("2 GPUs")
    notifier.alive("2 GPUs")
    notifier.alive("2 GPUs; 1 job")
    notifier.alive("2 GPUs; 1 job")
    assert manager.heard() == [
        ["READY=1", "STATUS=2 GPUs"],
        ["WATCHDOG=1"],
        ["WATCHDOG=1", "STATUS=2 GPUs; 1 job"],
        ["WATCHDOG=1"],
    ]


def test_where_no_watchdog_waits_only_news_are_told(manager: Manager) -> None:
    notifier = Notifier(manager.path)
    notifier.alive("a\nb")
    notifier.alive("a\nb")
    assert manager.heard() == [["STATUS=a b"]], "one line: what follows would be another field"


def test_the_loop_rests_for_a_quarter_of_what_the_watchdog_bears() -> None:
    environment = {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "8000000", "WATCHDOG_PID": "7"}
    assert Notifier.of(environment, 7).rest_s == 2.0
    assert Notifier.of(environment, 8).rest_s == REST_S, "it is another's"
    assert Notifier.of({**environment, "WATCHDOG_USEC": "600000000"}, 7).rest_s == REST_S
    assert Notifier.of({}, 7).rest_s == REST_S


def test_a_manager_that_is_not_there_or_does_not_listen_holds_nothing_up(
    manager: Manager, tmp_path: Path
) -> None:
    Notifier(str(tmp_path / "nobody")).ready("x")
    Notifier().ready("x")
    notifier = Notifier(manager.path, watchdog_s=1)
    for number in range(10_000):
        notifier.alive(str(number))


def test_every_line_of_an_entry_carries_its_level() -> None:
    record = logging.LogRecord("a.b", logging.WARNING, "", 0, "one\n\ntwo %s", ("x",), None)
    assert JournalFormatter("%(name)s: %(message)s").format(record) == "<4>a.b: one\n<4>two x"
    assert levelled("why\n\nhint: what") == "<3>why\n<3>hint: what"


def test_only_what_really_goes_to_the_journal_is_written_for_it(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        there = os.fstat(log.fileno())
        named = {"JOURNAL_STREAM": f"{there.st_dev}:{there.st_ino}"}
        assert goes_to_journal(named, log.fileno())
        assert not goes_to_journal({"JOURNAL_STREAM": "8:1"}, log.fileno())
        assert not goes_to_journal({}, log.fileno())
