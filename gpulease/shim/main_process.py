"""The main process of a worker and the process group that it leads.

Signals go to it as a terminal and a shell would send them. It keeps its pid until the shim has
reaped it, which happens here too, together with all orphans of the worker.
"""

from __future__ import annotations

import os

from gpulease.record import record, replace
from gpulease.shim import process_tree
from gpulease.wire.frames import BadFrame

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
else:
    import _signal as signal  # plain numbers, without enumerations

TO_THE_GROUP = frozenset(
    {
        *(signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH),
        *(signal.SIGHUP, signal.SIGTERM, signal.SIGPIPE, signal.SIGKILL),
    }
)
"""Signals that a terminal, timeout(1) and the end of a pipeline send to every process of a command.
Any other signal is for the main process alone."""
_STOPPED_BY_A_TERMINAL = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)


@record(frozen=True)
class ChildChanges:
    """What has happened to the children of this shim since they were last reaped."""

    exit_code: int | None = None
    """The main process has ended, with this code or, below 0, by this signal."""
    stopped_by: int | None = None
    """The main process was stopped by this signal."""
    orphan_stopped: bool = False
    """Another child was stopped as a terminal does it."""
    none_left: bool = False


class MainProcess:
    """The child of this shim that became the command."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.stopped_by: int | None = None
        """The signal that stopped it, while it is stopped."""
        self._is_reaped = False

    def reap(self) -> ChildChanges:
        """Reap every child that has ended, and note those that were stopped or continued."""
        changes = ChildChanges()
        try:
            while (found := os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED))[0] != 0:
                pid, status = found
                if pid == self.pid:
                    changes = self._note(changes, status)
                elif os.WIFSTOPPED(status) and os.WSTOPSIG(status) in _STOPPED_BY_A_TERMINAL:
                    changes = replace(changes, orphan_stopped=True)
        except ChildProcessError:
            changes = replace(changes, none_left=True)
        return changes

    def send(self, number: int) -> None:
        """Send a signal to it, or to its group where a terminal would; never to a reused pid.

        Raises:
            BadFrame: no such signal exists.
        """
        if number not in signal.valid_signals():
            raise BadFrame(f"no signal {number}")
        if number not in TO_THE_GROUP:
            self.send_alone(number)
        elif not self._is_reaped or process_tree.has_group(os.getpid(), self.pid):
            _kill(-self.pid, number)

    def send_alone(self, number: int) -> None:
        """Send a signal to this one process if it still exists."""
        if not self._is_reaped:
            _kill(self.pid, number)

    def _note(self, changes: ChildChanges, status: int) -> ChildChanges:
        if os.WIFSTOPPED(status):
            self.stopped_by = os.WSTOPSIG(status)
            return replace(changes, stopped_by=self.stopped_by)
        self.stopped_by = None
        if os.WIFCONTINUED(status):
            return replace(changes, stopped_by=None)
        self._is_reaped = True
        return replace(changes, stopped_by=None, exit_code=os.waitstatus_to_exitcode(status))


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return  # it has ended, or has become another user
