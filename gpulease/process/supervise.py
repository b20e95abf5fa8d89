"""A shim's life after the fork: keep the worker company until its last process has gone.

Reaps, tells the peers, and asks the worker to go when it is told to or when its time is up. Opens
nothing: all that it uses was opened before the rights were given up.
"""

import json
import math
import os
import resource
import signal
import socket
from collections.abc import Callable, Mapping
from typing import Any

from gpulease.frames import BadFrame, FrameKind, frame
from gpulease.process import tree
from gpulease.process.chronicle import Chronicle
from gpulease.process.exec import Worker
from gpulease.process.logs import JobLog
from gpulease.process.loop import Loop
from gpulease.process.orders import ShimOrder
from gpulease.process.peers import Peer, Peers, Role
from gpulease.process.record import Failure, failure
from gpulease.process.streams import PIECE, Input, Output

ATTACH_PATIENCE_S = 10.0
TO_THE_GROUP = frozenset(
    {
        *(signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH),
        *(signal.SIGHUP, signal.SIGTERM, signal.SIGPIPE, signal.SIGKILL),
    }
)
"""What a terminal, timeout(1) and the end of a pipeline send to every process of a command; any
other signal is for the one process that was named."""
_KILL_AGAIN_S = 0.1
_LINGER_STEP_S = 1.0
_LONGEST_GRACE_S = 86400.0
_LONGEST_REASON = 64


class Supervisor:
    """The company of one worker.

    `listener` is the job's socket, `owner` and `daemon` the uids that may connect to it, `report`
    tells the daemon how the launch went, and `children` becomes readable when a child has ended.
    """

    def __init__(
        self,
        order: ShimOrder,
        chronicle: Chronicle,
        listener: socket.socket,
        uids: tuple[int, int],
        report: Callable[[Mapping[str, Any]], None],
        children: int,
    ) -> None:
        self._loop = Loop()
        self._peers = Peers(self._loop, listener, *uids, self)
        self._chronicle = chronicle
        self._report = report
        self._children = children
        self._awaits_attach = order.awaits_attach
        self._grace_s = order.grace_s
        self._time_limit_s = order.time_limit_s
        self._started_at: float | None = None
        self._kill_at = math.inf
        self._failure: Failure | None = None

    def keep(self, worker: Worker, stdout: JobLog, stderr: JobLog) -> None:
        """Stay until the worker has gone and everyone has heard of it."""
        self._pid = worker.pid
        self._complaint: int | None = worker.complaint
        self._input = Input(self._loop, worker.stdin)
        self._outputs = (
            Output(self._loop, worker.stdout, FrameKind.STDOUT, stdout, self._peers),
            Output(self._loop, worker.stderr, FrameKind.STDERR, stderr, self._peers),
        )
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
            complaint = os.read(self._complaint, PIECE)
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
        self._started_at = self._loop.now()
        start = self._chronicle.note_start(self._pid)
        self._chronicle.write()
        self._report({"started": start})
        self._tell(FrameKind.STARTED, start)
        self._limit_time(self._time_limit_s)

    def _wait_no_longer(self) -> None:
        """Go on without the peer that was expected: all of the output is in the log."""
        self._peers.release()
        if self._peers.attached is None:
            self._input.end()

    # The end.

    def _reap(self) -> None:
        """Collect whoever has ended; once there is no child left, the worker is gone."""
        try:
            os.read(self._children, PIECE)
        except BlockingIOError:
            return
        main_exit: dict[str, Any] | None = None
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
                if ended[0] == self._pid:
                    main_exit = self._note_main_exit(os.waitstatus_to_exitcode(ended[1]))
        except ChildProcessError:
            self._end()
            return
        if main_exit is not None:
            # News only where others are left: else it is the end, which says all of it.
            self._chronicle.write()
            self._tell(FrameKind.MAIN_EXITED, main_exit)
            if self._chronicle.stopping is not None:
                # Who was being born when the first request went round may have missed it.
                tree.terminate(os.getpid())

    def _note_main_exit(self, code: int) -> dict[str, Any] | None:
        self._learn_start()
        return None if self._failure is not None else self._chronicle.note_main_exit(code)

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
        for timer in ("kill", "time_limit"):
            self._loop.cancel_timer(timer)
        self._loop.forget(self._children)
        self._tell(FrameKind.EXITED, end)
        self._peers.begin_farewell()
        if self._failure is not None:
            self._report({"failed": self._failure._asdict()})

    # Stopping.

    def _limit_time(self, limit_s: float | None) -> None:
        """Let the worker run so long, counted from its start; None: for ever."""
        self._time_limit_s = limit_s
        self._loop.cancel_timer("time_limit")
        if limit_s is not None and self._started_at is not None:
            self._loop.set_timer("time_limit", self._started_at + limit_s, self._time_is_up)

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
            tree.terminate(os.getpid())
        at = self._loop.now() + min(max(grace_s, 0.0), _LONGEST_GRACE_S)
        if at < self._kill_at:
            self._kill_at = at
            self._loop.set_timer("kill", at, self._kill)

    def _kill(self) -> None:
        self._kill_at = 0.0
        tree.kill(os.getpid())
        self._after(_KILL_AGAIN_S, "kill", self._kill)

    def _signal(self, number: int) -> None:
        """Signal the worker as a terminal and a shell would; never another of the same number."""
        if number not in signal.valid_signals():
            raise BadFrame(f"no signal {number}")
        alone = number not in TO_THE_GROUP
        if self._chronicle.main_exited and (alone or not tree.has_group(os.getpid(), self._pid)):
            return
        try:
            (os.kill if alone else os.killpg)(self._pid, number)
        except (ProcessLookupError, PermissionError):
            return

    # What peers want.

    def welcome(self, peer: Peer) -> None:
        """Tell a new peer what happened before it came: news, and output if it wants any."""
        held = None
        if peer.role is Role.ATTACH:
            held = self._peers.release()
            self._loop.cancel_timer("attach")
        told = self._chronicle
        _send(peer, FrameKind.STARTED, told.started)
        if held is not None:
            peer.send(held)
        elif peer.role is not Role.CONTROL:
            for output in self._outputs:
                output.replay(peer)
        _send(peer, FrameKind.STOPPING, told.stopping)
        _send(peer, FrameKind.MAIN_EXITED, told.main_exited)
        _send(peer, FrameKind.EXITED, told.exited)

    def obey(self, peer: Peer, kind: FrameKind, payload: bytes) -> None:
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
            case FrameKind.SIGNAL:
                self._signal(int(json.loads(payload)["signal"]))
            case FrameKind.STOP | FrameKind.TIME_LIMIT:
                self._obey_master(peer, kind, json.loads(payload))
            case _:
                pass  # a second HELLO, or the input of one who lost its place

    def left_alone(self) -> None:
        """Let the worker see the end of its input: who typed it is gone."""
        self._input.end()

    def _obey_master(self, peer: Peer, kind: FrameKind, content: Mapping[str, Any]) -> None:
        if peer.role is not Role.CONTROL:
            peer.refuse("only the daemon may control a job this way")
        elif kind is FrameKind.STOP:
            self._stop(str(content["reason"]), float(content["grace_s"]))
        else:
            limit = content["time_limit_s"]
            self._limit_time(None if limit is None else float(limit))

    def _tell(self, kind: FrameKind, content: Mapping[str, Any]) -> None:
        self._peers.tell(kind, content)


def _send(peer: Peer, kind: FrameKind, content: Mapping[str, Any] | None) -> None:
    if content is not None:
        peer.send(frame(kind, json.dumps(content).encode()))
