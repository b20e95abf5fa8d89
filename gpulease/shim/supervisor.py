"""The life of a shim after the fork: it stays with its worker until the last process has ended.

It reaps processes, serves the clients of the job's socket, and stops the worker when it is asked to
or when the time limit is reached. It opens no files: everything that it uses was opened before it
gave up the rights of root.
"""

from __future__ import annotations

import math
import os

from gpulease.event_loop import EventLoop
from gpulease.light_json import decode_plain
from gpulease.record import replace
from gpulease.shim import process_tree
from gpulease.shim.accounting import HostUse, host_use, kernel_limit
from gpulease.shim.clients import (
    ONLY_THE_DAEMON,
    ClientRole,
    Payload,
    ShimClient,
    ShimClients,
)
from gpulease.shim.launch_request import EarlySignalSpec, ShimSpec
from gpulease.shim.output import InputStream, JobLog, OutputStream
from gpulease.shim.process_tree import MainProcess
from gpulease.shim.record import Failure, JobEvents, failure
from gpulease.shim.worker import Worker
from gpulease.wire.frames import BadFrame, FrameKind

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    import socket
    from collections.abc import Callable, Mapping
    from typing import Any

    from gpulease.shim.ram_watch import RamWatch
else:
    import _signal as signal  # plain numbers, without enumerations

_EARLY_SIGNAL, _TIME_LIMIT = "early_signal", "time_limit"
"""Names of timers."""


class TimeLimit:
    """Call back when the time limit is reached, and some time before.

    The early signal is sent once, and again for a new limit only if that moment is still to come: a
    program may handle the signal once only, and end at the second one.
    """

    def __init__(
        self,
        loop: EventLoop,
        limit_s: float | None,
        early: EarlySignalSpec | None,
        send_early: Callable[[int], None],
        end: Callable[[], None],
    ) -> None:
        """`send_early` gets the early signal, and `end` is called when the limit is reached."""
        self._loop = loop
        self._limit_s = limit_s
        self._early = early if early and early.signal in signal.valid_signals() else None
        self._send_early = send_early
        self._end = end
        self._started_at: float | None = None
        self._is_sent = False

    def begin(self) -> None:
        """Count from now."""
        self._started_at = self._loop.now()
        self._set_timers()

    def change(self, limit_s: float | None) -> None:
        """Set another limit, counted from the start; None is no limit.

        The present limit once more, which a restarted daemon sends, changes nothing.
        """
        if limit_s != self._limit_s:
            self._limit_s = limit_s
            self._set_timers()

    def cancel(self) -> None:
        """Stop counting."""
        for timer in (_EARLY_SIGNAL, _TIME_LIMIT):
            self._loop.cancel_timer(timer)

    def _set_timers(self) -> None:
        self.cancel()
        if self._limit_s is None or self._started_at is None:
            return
        end_at = self._started_at + self._limit_s
        if self._early is not None:
            # If this moment has passed, the signal is due at once, and before the end.
            early_at = end_at - max(0.0, self._early.before_s)
            if early_at > self._loop.now() or not self._is_sent:
                self._loop.set_timer(_EARLY_SIGNAL, early_at, self._send)
        self._loop.set_timer(_TIME_LIMIT, end_at, self._end)

    def _send(self) -> None:
        self._is_sent = True
        if self._early is not None:
            self._send_early(self._early.signal)


ATTACH_WITHIN_S = 10.0
_KILL_AGAIN_S = 0.1
_PODMAN_ENDS_WITHIN_S = 3.0
"""Time for podman to note that a killed container has ended."""
_CHECK_CLIENTS_EVERY_S = 1.0
_ENDING = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM})
"""The signals with which somebody ends a program."""
_LONGEST_GRACE_S = 86400.0
_LONGEST_REASON = 64
_LONGEST_FAILURE = 64 << 10
_LONGEST_NOTICE = 2000


class Supervisor:
    """Stays with one worker, from its start to its end."""

    def __init__(
        self,
        spec: ShimSpec,
        events: JobEvents,
        listener: socket.socket,
        daemon: int,
        report: Callable[[Mapping[str, Any]], None],
        children: int,
    ) -> None:
        """`listener` is the job's socket, and `daemon` the uid of the daemon.

        `report` tells the daemon how the launch went. `children` is a descriptor that is readable
        when a child has ended.
        """
        self._loop = EventLoop()
        owner = daemon if spec.identity is None else spec.identity.uid
        on_terminal = spec.terminal is not None
        self._clients = ShimClients(self._loop, listener, owner, daemon, on_terminal, self)
        self._job = spec.job
        self._events = events
        self._report = report
        self._children = children
        self._awaits_attach = spec.awaits_attach
        self._ends_with_client = spec.ends_with_client
        self._grace_s = spec.grace_s
        self._time_limit = TimeLimit(
            self._loop, spec.time_limit_s, spec.early_signal, self._send_early, self._time_is_up
        )
        self._ram_watch: RamWatch | None = None
        if spec.ram is not None and kernel_limit(spec.job) is None:
            from gpulease.shim.ram_watch import RamWatch  # most shims need none

            self._ram_watch = RamWatch(self._loop, spec.ram, spec.ram_grace_s, self._notify)
        self._kill_at = math.inf
        self._killing_since: float | None = None
        self._failure: Failure | None = None

    def run(self, worker: Worker, stdout: JobLog, stderr: JobLog) -> None:
        """Return when the worker has ended and every client knows."""
        self._set_up(worker, stdout, stderr)
        while not self._is_over():
            for output in self._outputs:
                output.read_on(self._clients.has_room)
            if self._clients.attached is not None:
                self._clients.attached.read_on(self._input.has_room)
            self._loop.step()

    def _set_up(self, worker: Worker, stdout: JobLog, stderr: JobLog) -> None:
        self._main = MainProcess(worker.pid)
        self._start_pipe: int | None = worker.failure
        self._terminal = terminal = worker.terminal
        end_of_input = terminal.end_of_input if terminal else None
        self._input = InputStream(self._loop, worker.stdin, end_of_input)
        stream, on = OutputStream, terminal is not None
        self._outputs = (
            stream(self._loop, self._clients, FrameKind.STDOUT, worker.stdout, stdout, on),
            stream(self._loop, self._clients, FrameKind.STDERR, worker.stderr, stderr),
        )
        # Without a pipe for standard error, that is the terminal as well.
        self._messages = self._outputs[0 if worker.stderr is None else 1]
        self._loop.on_readable(worker.failure, self._note_start)
        self._loop.on_readable(self._children, self._reap)
        if self._awaits_attach:
            self._clients.hold_output()
            self._loop.set_timer_after("attach", ATTACH_WITHIN_S, self._stop_awaiting_attach)

    def _is_over(self) -> bool:
        if self._events.exited is None:
            return False
        if self._failure is not None:
            return True
        if self._clients.holds_output or not self._clients.all_served():
            self._loop.set_timer_after("clients", _CHECK_CLIENTS_EVERY_S, lambda: None)
            return False
        return True

    # The start.

    def _note_start(self) -> None:
        """Note whether the worker became its command: then the pipe closes without a failure."""
        if self._start_pipe is None:
            return
        try:
            failed = os.read(self._start_pipe, _LONGEST_FAILURE)
        except BlockingIOError:
            return
        self._loop.forget(self._start_pipe)
        os.close(self._start_pipe)
        self._start_pipe = None
        if failed:
            self._failure = failure(decode_plain(failed))
            return
        start = self._events.note_start(self._main.pid)
        self._events.write(sync=False)  # a crash of the machine ends the job in any case
        self._report({"started": start})
        self._clients.send_json(FrameKind.STARTED, start)
        self._time_limit.begin()
        if self._ram_watch is not None:
            self._ram_watch.begin()

    def _stop_awaiting_attach(self) -> None:
        """Continue without the expected client. All of the output is in the log."""
        self._clients.release_output()
        if self._clients.attached is None:
            self.detach()

    # The end.

    def _reap(self) -> None:
        """Reap the children that have ended. When no child is left, the worker has ended."""
        try:
            os.read(self._children, _LONGEST_FAILURE)
        except BlockingIOError:
            return
        changes = self._main.reap()
        if changes.exit_code is not None:
            self._note_start()
            if self._failure is None:
                self._events.note_main_exit(changes.exit_code)
        if changes.none_left:
            self._end()
        elif changes.exit_code is not None:
            self._outlive_main()
        elif changes.stopped_by is not None:
            self._clients.send_json(FrameKind.SUSPENDED, {"signal": changes.stopped_by})
        elif self._events.main_exited is not None:
            self._check_orphans(changes.orphan_stopped)

    def _outlive_main(self) -> None:
        """Continue with the other processes of the worker after its main process has ended."""
        if self._events.main_exited is None:
            return
        self._events.stop_came_late = False  # processes are left to stop
        self._events.write()
        self._clients.send_json(FrameKind.MAIN_EXITED, self._events.main_exited)
        if self._events.stopping is not None:
            # A process that was being forked during the first round may have missed SIGTERM.
            process_tree.terminate(os.getpid())
        else:
            process_tree.hang_up_the_stopped(os.getpid())
        process_tree.end_pause_processes(os.getpid())

    def _check_orphans(self, has_stopped: bool) -> None:
        """End those of the remaining processes that would never end."""
        if has_stopped:
            process_tree.hang_up_the_stopped(os.getpid())
        process_tree.end_pause_processes(os.getpid())

    def _end(self) -> None:
        for output in self._outputs:
            output.finish()
        self._input.close()
        if self._failure is not None:
            end = self._events.note_failure(self._failure)
        else:
            end = self._events.note_end(self._host_use())
        self._events.write()
        self._time_limit.cancel()
        if self._ram_watch is not None:
            self._ram_watch.cancel()
        self._loop.cancel_timer("kill")
        self._loop.forget(self._children)
        self._clients.send_json(FrameKind.EXITED, end)
        self._clients.begin_farewell()
        if self._failure is not None:
            self._report({"failed": vars(self._failure)})
        for output in self._outputs:
            output.sync()  # last, so that nobody waits for a slow disk

    def _host_use(self) -> HostUse:
        used, watch = host_use(self._job), self._ram_watch
        if watch is None:
            return used
        if used.ram_peak is None and watch.peak:
            used = replace(used, ram_peak=watch.peak)
        if not watch.kills:
            return used
        return replace(used, oom_kills=watch.kills, ram_limit=watch.limit, watched=True)

    # Stopping.

    def _send_early(self, number: int) -> None:
        if self._events.stopping is None:
            self._main.send_alone(number)

    def _time_is_up(self) -> None:
        self._stop("time_limit", self._grace_s)

    def _stop(self, reason: str, grace_s: float) -> None:
        """Send SIGTERM to all processes of the worker, and SIGKILL to the rest after the grace.

        A second call may shorten the grace and cannot lengthen it. The first reason is kept.
        """
        if self._events.stopping is None:
            stopping = self._events.note_stopping(reason[:_LONGEST_REASON])
            self._events.write()
            self._clients.send_json(FrameKind.STOPPING, stopping)
            was_reached = process_tree.terminate(os.getpid())
            # The command may have ended by itself while that was written: it has done its work.
            self._events.stop_came_late = not was_reached and self._events.main_exited is None
        at = self._loop.now() + min(max(grace_s, 0.0), _LONGEST_GRACE_S)
        if at < self._kill_at:
            self._kill_at = at
            self._loop.set_timer("kill", at, self._kill)

    def _kill(self) -> None:
        if self._events.stop_came_late:
            self._reap()  # before any process that the command has left is killed
            if self._events.exited is not None:
                return
        began, self._kill_at = self._killing_since, 0.0
        if began is None:
            began = self._killing_since = self._loop.now()
        spare = self._loop.now() < began + _PODMAN_ENDS_WITHIN_S
        process_tree.kill(os.getpid(), spare_podman=spare)
        self._loop.set_timer_after("kill", _KILL_AGAIN_S, self._kill)

    # What clients ask for.

    def welcome(self, client: ShimClient) -> None:
        """Send a new client what happened before it connected, and output if it shows any."""
        events, held = self._events, None
        if client.role is ClientRole.ATTACH:
            held = self._clients.release_output()
        _send(client, FrameKind.STARTED, events.started)
        if held is not None:
            client.send(held)
        elif client.role is not ClientRole.CONTROL:
            for output in self._outputs:
                output.replay(client)
        if self._main.stopped_by is not None:
            client.send_json(FrameKind.SUSPENDED, {"signal": self._main.stopped_by})
        _send(client, FrameKind.STOPPING, events.stopping)
        if events.exited is None:
            # After the end this would say that other processes still run.
            _send(client, FrameKind.MAIN_EXITED, events.main_exited)
        _send(client, FrameKind.EXITED, events.exited)

    def attach(self, client: ShimClient, hello: Payload) -> None:
        """Let `client` write from now on, on a terminal of the size that its HELLO may contain."""
        self._clients.release_output()
        self._loop.cancel_timer("attach")
        if self._events.exited is not None:
            return  # the worker's descriptors are closed, and their numbers may be reused
        if "window" in hello:
            self._resize(hello.inner("window"))
            if self._terminal is not None:
                self._terminal.request_redraw()

    def handle(self, client: ShimClient, kind: FrameKind, payload: bytes) -> None:
        """Do what a client asks for, if it may, and if the worker still runs."""
        if kind < FrameKind.HELLO:
            raise BadFrame("only a shim sends frames of this kind")
        if self._events.exited is not None:
            return
        match kind:
            case FrameKind.STDIN if client is self._clients.attached:
                self._type(payload)
            case FrameKind.STDIN_END if client is self._clients.attached:
                self._input.end()
            case FrameKind.WINDOW if client is self._clients.attached:
                self._resize(Payload(payload))
            case FrameKind.SIGNAL:
                self._send_signal(Payload(payload).integer("signal"))
            case FrameKind.STOP | FrameKind.TIME_LIMIT | FrameKind.NOTICE:
                self._control(client, kind, Payload(payload))
            case _:
                pass  # input from a client that does not write, or no longer does

    def _type(self, typed: bytes) -> None:
        if self._terminal is not None and self._terminal.interrupts(typed):
            self._events.interrupted = True
        self._input.feed(typed)

    def _send_signal(self, number: int) -> None:
        self._main.send(number)
        self._events.interrupted |= number in _ENDING

    def log_bug(self, error: Exception) -> None:
        """Write an error of this shim to the job's log, its only output."""
        where, at = "", error.__traceback__
        while at is not None:
            where, at = f"{at.tb_frame.f_code.co_filename}:{at.tb_lineno}", at.tb_next
        self._messages.log_line(f"the shim failed and closed a connection: {error!r} ({where})")

    def detach(self) -> None:
        """Let the worker see the end of its input, since the client that typed it is gone.

        On a terminal the input goes on: another client may attach and type.
        """
        if self._ends_with_client and self._events.exited is None:
            self._stop("client_gone", self._grace_s)
        if self._terminal is None:
            self._input.end()

    def _notify(self, text: str) -> None:
        """Write a line to the job's output."""
        self._messages.insert(f"gpulease: {text}"[:_LONGEST_NOTICE])

    def _resize(self, window: Payload) -> None:
        rows, columns = window.integer("rows"), window.integer("columns")
        if self._terminal is not None:
            self._terminal.resize(rows, columns)

    def _control(self, client: ShimClient, kind: FrameKind, content: Payload) -> None:
        if client.role is not ClientRole.CONTROL:
            client.refuse(ONLY_THE_DAEMON)
        elif kind == FrameKind.STOP:
            self._stop(content.text("reason"), content.number("grace_s"))
        elif kind == FrameKind.NOTICE:
            self._notify(content.text("text"))
        else:
            unlimited = content.is_null("time_limit_s")
            self._time_limit.change(None if unlimited else content.number("time_limit_s"))


def _send(client: ShimClient, kind: FrameKind, content: Mapping[str, Any] | None) -> None:
    if content is not None:
        client.send_json(kind, content)
