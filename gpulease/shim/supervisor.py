"""A shim's life after the fork: keep the worker company until its last process has gone.

Reaps, tells the peers, and asks the worker to go when it is told to or when its time is up. Opens
nothing: all that it uses was opened before the rights were given up.

A worker's time: when it is up, and when the worker is warned of that.
"""

import json
import math
import os
import resource
import signal
import socket
from collections.abc import Callable, Mapping
from typing import Any

from gpulease.event_loop import Loop
from gpulease.shim import process_tree
from gpulease.shim.clients import ShimClients
from gpulease.shim.connection import Payload, Role, ShimClient
from gpulease.shim.launch_request import EarlySignalSpec, ShimSpec
from gpulease.shim.log_file import JobLog
from gpulease.shim.main_process import MainProcess
from gpulease.shim.record import Chronicle, Failure, failure
from gpulease.shim.streams import Input, Output
from gpulease.shim.worker import Worker
from gpulease.wire.frames import BadFrame, FrameKind

_WARNING, _END = "early_signal", "time_limit"
"""Names of timers."""


class TimeLimit:
    """Call back when the time is up, and some time before.

    The warning comes once, and once more for a new limit whose warning is still to come: whoever
    handles the signal may do so for one only, and die of a second.
    """

    def __init__(
        self,
        loop: Loop,
        limit_s: float | None,
        early: EarlySignalSpec | None,
        warn: Callable[[int], None],
        end: Callable[[], None],
    ) -> None:
        """Measure nothing yet; `warn` gets the signal to send, `end` is for when it is up."""
        self._loop = loop
        self._limit_s = limit_s
        self._early = early if early and early.signal in signal.valid_signals() else None
        self._warn = warn
        self._end = end
        self._started_at: float | None = None
        self._warned = False

    def begin(self) -> None:
        """Count from now."""
        self._started_at = self._loop.now()
        self._arm()

    def set(self, limit_s: float | None) -> None:
        """Let it be so long from the start, instead of what it was; None: for ever.

        The same again, as a daemon says that has come back, changes nothing.
        """
        if limit_s != self._limit_s:
            self._limit_s = limit_s
            self._arm()

    def _arm(self) -> None:
        self.cancel()
        if self._limit_s is None or self._started_at is None:
            return
        end_at = self._started_at + self._limit_s
        if self._early is not None:
            # Where that is past by now, it is due at once, and before the end.
            warn_at = end_at - max(0.0, self._early.before_s)
            if warn_at > self._loop.now() or not self._warned:
                self._loop.set_timer(_WARNING, warn_at, self._send)
        self._loop.set_timer(_END, end_at, self._end)

    def cancel(self) -> None:
        """Measure no longer."""
        for timer in (_WARNING, _END):
            self._loop.cancel_timer(timer)

    def _send(self) -> None:
        self._warned = True
        if self._early is not None:
            self._warn(self._early.signal)


ATTACH_PATIENCE_S = 10.0
_KILL_AGAIN_S = 0.1
_LINGER_STEP_S = 1.0
_LONGEST_GRACE_S = 86400.0
_LONGEST_REASON = 64
_LONGEST_COMPLAINT = 64 << 10
_LONGEST_NOTICE = 2000


class Supervisor:
    """The company of one worker.

    `listener` is the job's socket, `owner` and `daemon` the uids that may connect to it, `report`
    tells the daemon how the launch went, and `children` becomes readable when a child has ended.
    """

    def __init__(
        self,
        order: ShimSpec,
        chronicle: Chronicle,
        listener: socket.socket,
        uids: tuple[int, int],
        report: Callable[[Mapping[str, Any]], None],
        children: int,
    ) -> None:
        self._loop = Loop()
        self._peers = ShimClients(self._loop, listener, uids, order.terminal is not None, self)
        self._chronicle = chronicle
        self._report = report
        self._children = children
        self._awaits_attach = order.awaits_attach
        self._grace_s = order.grace_s
        self._time_limit = TimeLimit(
            self._loop, order.time_limit_s, order.early_signal, self._warn, self._time_is_up
        )
        self._kill_at = math.inf
        self._failure: Failure | None = None

    def keep(self, worker: Worker, stdout: JobLog, stderr: JobLog) -> None:
        """Stay until the worker has gone and everyone has heard of it."""
        self._main = MainProcess(worker.pid)
        self._complaint: int | None = worker.complaint
        self._terminal = on = worker.terminal
        self._input = Input(self._loop, worker.stdin, on.end_of_input if on else None)
        self._outputs = (
            Output(
                self._loop, self._peers, FrameKind.STDOUT, worker.stdout, stdout, on is not None
            ),
            Output(self._loop, self._peers, FrameKind.STDERR, worker.stderr, stderr),
        )
        # Where standard error is the terminal as well, or is not there.
        self._messages = self._outputs[0 if worker.stderr is None else 1]
        self._loop.on_readable(worker.complaint, self._learn_start)
        self._loop.on_readable(self._children, self._reap)
        if self._awaits_attach:
            self._peers.hold()
            self._after(ATTACH_PATIENCE_S, "attach", self._wait_no_longer)
        while not self._is_over():
            self._regulate()
            self._loop.step()

    def _regulate(self) -> None:
        for output in self._outputs:
            output.flow(self._peers.has_room)
        if self._peers.attached is not None:
            self._peers.attached.listen(self._input.has_room)

    def _is_over(self) -> bool:
        if self._chronicle.exited is None:
            return False
        if self._failure is not None:
            return True
        if self._peers.is_holding or not self._peers.all_served():
            self._after(_LINGER_STEP_S, "linger", lambda: None)
            return False
        return True

    def _after(self, seconds: float, name: str, callback: Callable[[], None]) -> None:
        self._loop.set_timer(name, self._loop.now() + seconds, callback)

    # The start.

    def _learn_start(self) -> None:
        """Learn whether the worker became its command: if so, this pipe closed without a word."""
        if self._complaint is None:
            return
        try:
            complaint = os.read(self._complaint, _LONGEST_COMPLAINT)
        except BlockingIOError:
            return
        self._loop.forget(self._complaint)
        os.close(self._complaint)
        self._complaint = None
        if complaint:
            self._failure = failure(json.loads(complaint))
        else:
            self._note_start()

    def _note_start(self) -> None:
        start = self._chronicle.note_start(self._main.pid)
        self._chronicle.write()
        self._report({"started": start})
        self._tell(FrameKind.STARTED, start)
        self._time_limit.begin()

    def _wait_no_longer(self) -> None:
        """Go on without the peer that was expected: all of the output is in the log."""
        self._peers.release()
        if self._peers.attached is None:
            self.left_alone()

    # The end.

    def _reap(self) -> None:
        """Collect whoever has ended; once there is no child left, the worker is gone."""
        try:
            os.read(self._children, _LONGEST_COMPLAINT)
        except BlockingIOError:
            return
        news = self._main.collect()
        if news.exit_code is not None:
            self._learn_start()
            if self._failure is None:
                self._chronicle.note_main_exit(news.exit_code)
        if news.none_left:
            self._end()
        elif news.exit_code is not None:
            self._outlive_main()
        elif news.stopped_by is not None:
            self._tell(FrameKind.SUSPENDED, {"signal": news.stopped_by})
        elif news.orphan_stopped and self._chronicle.main_exited is not None:
            process_tree.hang_up_the_stopped(os.getpid())

    def _outlive_main(self) -> None:
        """Go on with the others of the worker; where there are none, the end says all of it."""
        if self._chronicle.main_exited is None:
            return
        self._chronicle.write()
        self._tell(FrameKind.MAIN_EXITED, self._chronicle.main_exited)
        if self._chronicle.stopping is not None:
            # Who was being born when the first request went round may have missed it.
            process_tree.terminate(os.getpid())
        else:
            process_tree.hang_up_the_stopped(os.getpid())

    def _end(self) -> None:
        for output in self._outputs:
            output.finish()
        self._input.close()
        if self._failure is not None:
            end = self._chronicle.note_failure(self._failure)
        else:
            peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
            end = self._chronicle.note_end(peak * 1024)
        self._chronicle.write()
        self._time_limit.cancel()
        self._loop.cancel_timer("kill")
        self._loop.forget(self._children)
        self._tell(FrameKind.EXITED, end)
        self._peers.begin_farewell()
        if self._failure is not None:
            self._report({"failed": self._failure._asdict()})
        for output in self._outputs:
            output.sync()  # after all else: nobody should have to wait for a slow disk

    # Stopping.

    def _warn(self, number: int) -> None:
        if self._chronicle.stopping is None:
            self._main.send_alone(number)

    def _time_is_up(self) -> None:
        self._stop("time_limit", self._grace_s)

    def _stop(self, reason: str, grace_s: float) -> None:
        """Ask the worker to go; whoever is left of it after the grace is killed.

        A second order may shorten the grace and cannot lengthen it; the first reason stands.
        """
        if self._chronicle.stopping is None:
            stopping = self._chronicle.note_stopping(reason[:_LONGEST_REASON])
            self._chronicle.write()
            self._tell(FrameKind.STOPPING, stopping)
            process_tree.terminate(os.getpid())
        at = self._loop.now() + min(max(grace_s, 0.0), _LONGEST_GRACE_S)
        if at < self._kill_at:
            self._kill_at = at
            self._loop.set_timer("kill", at, self._kill)

    def _kill(self) -> None:
        self._kill_at = 0.0
        process_tree.kill(os.getpid())
        self._after(_KILL_AGAIN_S, "kill", self._kill)

    # What peers want.

    def welcome(self, peer: ShimClient) -> None:
        """Tell a new peer what happened before it came: news, and output if it wants any."""
        told, held = self._chronicle, None
        if peer.role is Role.ATTACH:
            held = self._peers.release()
        _tell(peer, FrameKind.STARTED, told.started)
        if held is not None:
            peer.send(held)
        elif peer.role is not Role.CONTROL:
            for output in self._outputs:
                output.replay(peer)
        if self._main.suspended is not None:
            peer.tell(FrameKind.SUSPENDED, {"signal": self._main.suspended})
        _tell(peer, FrameKind.STOPPING, told.stopping)
        if told.exited is None:
            # With nothing left behind, it is no news beside the end.
            _tell(peer, FrameKind.MAIN_EXITED, told.main_exited)
        _tell(peer, FrameKind.EXITED, told.exited)

    def seat(self, peer: ShimClient, hello: Payload) -> None:
        """Let this peer write from now on, on a terminal of the size that its HELLO may tell."""
        self._peers.release()
        self._loop.cancel_timer("attach")
        if self._chronicle.exited is not None:
            return  # the descriptors of the worker are closed, and their numbers may be reused
        if self._terminal is None:
            peer.pour = self._input.pour
        if "window" in hello:
            self._resize(hello.inner("window"))
            if self._terminal is not None:
                self._terminal.ask_to_redraw()

    def obey(self, peer: ShimClient, kind: FrameKind, payload: bytes) -> None:
        """Carry out what a peer asks for, if it may, and if there is a worker still."""
        if kind < FrameKind.HELLO:
            raise BadFrame("a frame that only a shim may send")
        if self._chronicle.exited is not None:
            return
        match kind:
            case FrameKind.STDIN if peer is self._peers.attached:
                self._input.feed(payload)
            case FrameKind.STDIN_END if peer is self._peers.attached:
                self._input.end()
            case FrameKind.WINDOW if peer is self._peers.attached:
                self._resize(Payload(payload))
            case FrameKind.SIGNAL:
                self._main.send(Payload(payload).number("signal"))
            case FrameKind.STOP | FrameKind.TIME_LIMIT | FrameKind.NOTICE:
                self._obey_master(peer, kind, Payload(payload))
            case _:
                pass  # the input of one who does not write, or does no longer

    def met_bug(self, error: Exception) -> None:
        """Leave an error of this shim's own in the job's log, which is all that it can write to."""
        where, at = "", error.__traceback__
        while at is not None:
            where, at = f"{at.tb_frame.f_code.co_filename}:{at.tb_lineno}", at.tb_next
        self._messages.note(f"the shim failed and dropped a connection: {error!r} ({where})")

    def left_alone(self) -> None:
        """Let the worker see the end of its input: who typed it is gone.

        Not on a terminal, where another may come and type.
        """
        if self._terminal is None:
            self._input.end()

    def _resize(self, window: Payload) -> None:
        rows, columns = window.number("rows"), window.number("columns")
        if self._terminal is not None:
            self._terminal.resize(rows, columns)

    def _obey_master(self, peer: ShimClient, kind: FrameKind, content: Payload) -> None:
        if peer.role is not Role.CONTROL:
            peer.refuse("only the daemon may control a job this way")
        elif kind is FrameKind.STOP:
            self._stop(content.text("reason"), content.seconds("grace_s"))
        elif kind is FrameKind.NOTICE:
            self._messages.insert(f"gpulease: {content.text('text')}"[:_LONGEST_NOTICE])
        else:
            unlimited = content.is_null("time_limit_s")
            self._time_limit.set(None if unlimited else content.seconds("time_limit_s"))

    def _tell(self, kind: FrameKind, content: Mapping[str, Any]) -> None:
        self._peers.tell(kind, content)


def _tell(peer: ShimClient, kind: FrameKind, content: Mapping[str, Any] | None) -> None:
    if content is not None:
        peer.tell(kind, content)
