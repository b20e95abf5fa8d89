"""A worker's main process and the group that it leads: signalled as a terminal and a shell would.

Knows whether it is stopped; its pid is its own until the shim has collected it, which is done here
too, with all the orphans of the tree.
"""

import os
import signal
from typing import NamedTuple

from gpulease.shim import process_tree
from gpulease.wire.frames import BadFrame

TO_THE_GROUP = frozenset(
    {
        *(signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH),
        *(signal.SIGHUP, signal.SIGTERM, signal.SIGPIPE, signal.SIGKILL),
    }
)
"""What a terminal, timeout(1) and the end of a pipeline send to every process of a command; any
other signal is for the one process that was named."""


_STOPPED_BY_A_TERMINAL = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)


class News(NamedTuple):
    """What has become of the children of this shim since they were asked for last."""

    exit_code: int | None = None
    """The main process has ended, with this code or, below 0, by a signal."""
    stopped_by: int | None = None
    """The main process was stopped, by this signal."""
    orphan_stopped: bool = False
    """Another one was stopped as its terminal does it."""
    none_left: bool = False


class MainProcess:
    """The child of this shim that became the command."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.suspended: int | None = None
        """The signal that stopped it, while it is stopped."""
        self._gone = False

    def collect(self) -> News:
        """Collect every child that has ended, been stopped or been continued."""
        news = News()
        try:
            while (found := os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED))[0] != 0:
                pid, status = found
                news = self._learn(news, status) if pid == self.pid else _with(news, status)
        except ChildProcessError:
            news = news._replace(none_left=True)
        return news

    def _learn(self, news: News, status: int) -> News:
        if os.WIFSTOPPED(status):
            self.suspended = os.WSTOPSIG(status)
            return news._replace(stopped_by=self.suspended)
        self.suspended = None
        if os.WIFCONTINUED(status):
            return news._replace(stopped_by=None)
        self._gone = True
        return news._replace(stopped_by=None, exit_code=os.waitstatus_to_exitcode(status))

    def send(self, number: int) -> None:
        """Signal it, or its group where a terminal would; never another of the same number.

        Raises:
            BadFrame: there is no such signal.
        """
        if number not in signal.valid_signals():
            raise BadFrame(f"no signal {number}")
        if number not in TO_THE_GROUP:
            self.send_alone(number)
        elif not self._gone or process_tree.has_group(os.getpid(), self.pid):
            _send(-self.pid, number)

    def send_alone(self, number: int) -> None:
        """Signal the one process, if it is there still."""
        if not self._gone:
            _send(self.pid, number)


def _with(news: News, status: int) -> News:
    stopped = os.WIFSTOPPED(status) and os.WSTOPSIG(status) in _STOPPED_BY_A_TERMINAL
    return news._replace(orphan_stopped=True) if stopped else news


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return  # it is no more, or has become someone else
