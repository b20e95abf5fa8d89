"""Follow a job from the queue to its end, and return the exit code.

The daemon may stop and start meanwhile: the job is in its database, and the shim has the streams.
"""

from __future__ import annotations

import signal
import sys
import time

from gpulease.cli.attachment import (
    AttachMode,
    AttachRefused,
    Detached,
    Hooks,
    Left,
    attach,
    next_keys,
)
from gpulease.cli.attachment import name_of as name_of_keys
from gpulease.cli.caller import adds_carriage_returns, is_ours
from gpulease.cli.exit_codes import (
    QUEUED_AGAIN,
    SIGNALED,
    JobEnd,
    status_of_ending,
    status_of_job,
)
from gpulease.cli.job_watch import HAS_A_WORKER, RECONNECT_EVERY, JobWatch, current, id_of
from gpulease.cli.render import OutputClosed, message_lines, write_output, write_stderr
from gpulease.cli.signals import ENDING, EndedByInterrupt, Interrupted, Killed
from gpulease.errors import GpuleaseError, NoDaemon, NotAllowed
from gpulease.record import record
from gpulease.wire.frames import FrameKind

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpulease.cli.job_watch import StderrStatus
    from gpulease.cli.signals import Signals
    from gpulease.client.light_client import LightClient
    from gpulease.client.submission import Submission
    from gpulease.wire.jobs import JobView
    from gpulease.wire.machine import GpuView

_CTRL_BACKSLASH = b"\x1c"
_BY_ITSELF = ("exited", "signaled")
CANCEL_WITHIN = 5.0
"""Seconds for the daemon to confirm a cancellation; the user waits for the prompt."""
_VERDICT_WITHIN = 3.0
"""Seconds for the daemon to note the end of a job and find out if it ran out of GPU memory."""
_RETRY_VERDICT_WITHIN = 60.0
"""The same for a job that may be queued again."""
_VERDICT_EVERY = 0.05
_NAMES_WITHIN = 2.0
"""Seconds for the daemon to name the GPUs of a shell, which waits for that."""
_LOOKS_AWAY_AFTER = 5.0
"""Seconds after which a user may look at something else than this terminal."""
_ATTACH_WITHIN = 20.0
"""Seconds for a shim to answer on its socket, which it opens before the job is active."""
_ATTACH_AGAIN_AFTER = 0.002
"""Seconds, doubled each time."""


def _clean(text: str) -> str:
    from gpulease.drawing.words import clean

    return clean(text)


@record(frozen=True)
class FollowOptions:
    """How a command follows a job."""

    started: bool = True
    """This command submitted the job."""
    watches: bool = False
    """Show output only, and send no input."""
    keys: bytes = b""
    """The keys that detach."""
    is_shell: bool = False
    """The job is a shell: describe its lease."""
    may_run_again: bool = False
    """If the job fails, it may be queued again: wait for what the daemon decides."""
    verbose: bool = False
    """Say which GPU each device name of the frameworks is."""
    summary: bool = False
    """Say in one line what the job did with its GPUs."""
    desktop: str = "off"
    """The sequence by which the terminal shows a message on the desktop: osc9, osc777, or off."""
    again: str | None = None
    """The job that this one repeats."""


@record(frozen=True)
class _Attachment:
    """Whether the command was attached, and the end of the job as the shim reported it."""

    attached: bool
    ending: JobEnd | None = None


def follow(
    client: LightClient,
    job: JobView,
    signals: Signals,
    stderr: StderrStatus,
    options: FollowOptions,
    submission: Submission | None = None,
) -> int:
    """Return the exit code once the job has ended, or this command has detached from it.

    `submission` is what has just queued the job.

    Raises:
        EndedByInterrupt: SIGINT ended the job.
        Killed: a signal ends this command. The job is cancelled if it waits and this command
            submitted it.
        NotAllowed: the job belongs to another user.
    """
    return _Follower(client, signals, stderr, options).follow(job, submission)


class _Follower(JobWatch):
    """Follows a job, and those that continue it."""

    def __init__(
        self, client: LightClient, signals: Signals, stderr: StderrStatus, options: FollowOptions
    ) -> None:
        super().__init__(client, signals, stderr)
        self._options = options
        self._since = time.monotonic()

    def follow(self, job: JobView, submission: Submission | None) -> int:
        """Return what `follow` does."""
        while True:
            status = 0
            try:
                status, job = self._follow_to_end(job, submission)
                how = "has ended" if status == 0 else f"has ended with {status}"
                self._tell_desktop(job, how)
            except Detached:
                pass
            finally:
                self.stderr.line.clear()
            # A command that attached to a job shows how that one ended, if it failed.
            follows = self._options.started or job.outcome not in _BY_ITSELF
            if job.retried_as is None or not follows:
                return status
            job, submission = self.client.job(job.retried_as), None

    def _follow_to_end(self, job: JobView, submission: Submission | None) -> tuple[int, JobView]:
        """Return the exit code of one job, and the job as it was last seen. Raises: Detached."""
        try:
            was_waiting = job.state not in HAS_A_WORKER
            job = self.wait_for_start(job, submission, _keys_of(self._options))
            if was_waiting and job.state != "ended":
                self._tell_desktop(job, "has started")
            self._introduce(job)
            stay = self._stay(job)
            if stay.ending is None:
                return self._end_by_daemon(job, seen=stay.attached)
            self._summarize(job)
            if stay.ending.signal == signal.SIGINT:
                raise EndedByInterrupt(ctrl_c_typed=stay.ending.ctrl_c_typed)
            return status_of_ending(stay.ending), self._verdict(job, stay.ending)
        except Interrupted as interrupted:
            self._give_up(job, interrupted.signum)
            raise Killed(interrupted.signum) from None
        except Left as left:
            if left.signum in ENDING - {signal.SIGHUP}:
                raise Killed(left.signum) from None
            return SIGNALED + left.signum, job

    def _tell_desktop(self, job: JobView, what: str) -> None:
        """Have the terminal show a message, if that was asked for and the user may look away."""
        is_long = time.monotonic() - self._since >= _LOOKS_AWAY_AFTER
        if self._options.desktop == "off" or not is_long or not sys.stderr.isatty():
            return
        self._since = time.monotonic()
        text = _clean(f"job {job.label or job.id} ({job.name}) {what}").replace(";", ",")
        kind = "9;gpulease: " if self._options.desktop == "osc9" else "777;notify;gpulease;"
        write_stderr(f"\x1b]{kind}{text}\x07")

    def _introduce(self, job: JobView) -> None:
        """Say on a terminal where a job that has started runs, and more if that was asked for."""
        options, on_line = self._options, self.stderr.line
        if options.started and job.started_at and on_line.rewrites and not options.is_shell:
            from gpulease.cli.messages import started_line

            on_line.say(started_line(job, options.again))
        if options.is_shell and job.state == "active":
            from gpulease.cli.messages import shell_on

            self.stderr.print(shell_on(job, _names_of_gpus(self.client, job)))
        if options.verbose:
            from gpulease.cli.job_gpus import device_lines

            # The reply to a submission has them. A job that was watched otherwise is asked for.
            shown = job if job.devices else current(self.client.within(_NAMES_WITHIN), job)
            for line in device_lines(shown):
                self.stderr.print(line)
        if any(lease.shared_with for lease in job.leases):
            from gpulease.drawing.words import id_of, index_of, sharing

            indexes = {gpu.uuid: index_of(gpu) for gpu in _gpus(self.client)}
            self.stderr.print(
                f"gpulease: job {id_of(job)} shares {sharing(job, indexes)}; "
                "--exclusive waits for a GPU alone"
            )

    def _summarize(self, job: JobView) -> None:
        """Print what a job did, once the daemon knows of its end, if that was asked for."""
        if not self._options.summary:
            return
        from gpulease.cli.job_gpus import summary_line

        deadline = time.monotonic() + _VERDICT_WITHIN
        try:
            job = self.client.within(_VERDICT_WITHIN).job(job.id)
            while job.state != "ended" and time.monotonic() < deadline:
                time.sleep(_VERDICT_EVERY)
                job = self.client.within(_VERDICT_WITHIN).job(job.id)
        except GpuleaseError:
            pass  # what is known is printed
        self.stderr.print(summary_line(job))

    def _verdict(self, job: JobView, ending: JobEnd) -> JobView:
        """Return a job as the daemon knows it, if that may say more about its end than its shim."""
        is_queued_again = ending.reason in QUEUED_AGAIN
        failed = status_of_ending(ending) != 0 and self._options.started
        if not is_queued_again and not failed:
            return job
        long = is_queued_again or self._options.may_run_again
        deadline = time.monotonic() + (_RETRY_VERDICT_WITHIN if long else _VERDICT_WITHIN)
        while job.state != "ended" and time.monotonic() < deadline:
            time.sleep(_VERDICT_EVERY)
            job = current(self.client.within(deadline - time.monotonic()), job)
        if job.out_of_memory or job.retried_as:
            self._say_last(job)
        return job

    def _say_last(self, job: JobView) -> None:
        if job.outcome == "exited" and not job.out_of_memory and not job.retried_as:
            return  # its output says it; the module of the words would cost half of a short run
        from gpulease.cli.messages import last_words

        if words := last_words(job):
            self.stderr.print(words)

    def _stay(self, job: JobView) -> _Attachment:
        """Attach this command to a job until that ends, or say why it is not attached."""
        if job.state == "ended":
            return _Attachment(attached=False)
        hooks = Hooks(lambda: self._cancel(job.id), self.stderr.print, message_lines)
        deadline, again_after = time.monotonic() + _ATTACH_WITHIN, _ATTACH_AGAIN_AFTER
        while job.directory is not None and time.monotonic() < deadline:
            try:
                ending = attach(job.directory, self.signals, hooks, _mode(job, self._options))
                return _Attachment(attached=True, ending=ending)
            except AttachRefused as refusal:
                if not self._options.started:
                    raise _refused(job, str(refusal)) from None
                self.stderr.print(
                    f"gpulease: not attached to job {id_of(job)}: {_clean(str(refusal))}"
                )
                return _Attachment(attached=True)
            except OSError:
                # The job has ended, or the shim has no room for one more client: the daemon knows.
                job = current(self.client.within(deadline - time.monotonic()), job)
                if job.state == "ended":
                    return _Attachment(attached=False)
                self.signals.interruptible(time.sleep, again_after)
                again_after = min(2 * again_after, _VERDICT_EVERY)
        if not self._options.started:
            from gpulease.cli.render import own_name

            is_own = job.user == own_name()
            why = "its socket cannot be reached" if is_own else f"it belongs to {job.user}"
            raise _refused(job, why)
        self.stderr.print(
            f"gpulease: cannot attach to job {id_of(job)}; "
            f"gpulease logs -f {id_of(job)} shows its output"
        )
        return _Attachment(attached=False)

    def _cancel(self, number: int) -> str | None:
        try:
            self.client.within(CANCEL_WITHIN).cancel(number)
        except GpuleaseError as error:
            return f"gpulease: {_clean(error.message)}"
        return None

    def _end_by_daemon(self, job: JobView, *, seen: bool) -> tuple[int, JobView]:
        """Return the exit code and the end of a job whose shim did not report it.

        The command that submitted the job prints all its output.
        """
        job = self.wait_for_end(job)
        if not self._options.started and not seen:
            from gpulease.cli.messages import ended

            self.stderr.print(ended(job))
            return status_of_job(job), job
        if not seen and job.started_at is not None:
            try:
                self._print_kept(job)
            except (OSError, OutputClosed):
                if status_of_job(job) == 0:
                    raise
        self._say_last(job)
        self._summarize(job)
        return status_of_job(job), job

    def _print_kept(self, job: JobView) -> None:
        """Print all output of a job, also across a restart of the daemon; no byte twice."""
        shown = dict.fromkeys((FrameKind.STDOUT, FrameKind.STDERR), 0)
        # The job's terminal has ended its lines with CR LF, and ours would add a second CR, since
        # it is not held as it is during an attachment.
        ends_lines = job.terminal and adds_carriage_returns(1)
        while True:
            try:
                for kind, piece in self.client.logs(job.id, begin=shown):
                    is_for_terminal = ends_lines and kind == FrameKind.STDOUT
                    write_output(kind, piece.replace(b"\r\n", b"\n") if is_for_terminal else piece)
                    shown[kind] += len(piece)
            except NoDaemon:
                self.signals.interruptible(time.sleep, RECONNECT_EVERY)
            else:
                return

    def _give_up(self, job: JobView, signum: int) -> None:
        """Cancel a waiting job that this command submitted, unless only the terminal was lost.

        Raises:
            Detached: the signal began the detach keys.
        """
        self.stderr.line.clear()
        if signum == signal.SIGHUP:
            return
        number, options = id_of(job), self._options
        leaves = signum == signal.SIGQUIT and _leaves_by_quit(options)
        if leaves and options.started and next_keys(0, len(options.keys) - 1) == options.keys[1:]:
            self.stderr.print(
                f"gpulease: job {number} stays in the queue: gpulease attach {number}"
            )
            raise Detached
        if not options.started:
            self.stderr.print(
                f"gpulease: job {number} keeps its place in the queue: gpulease attach {number}"
            )
            return
        try:
            self.client.within(CANCEL_WITHIN).cancel(job.id)
            self.stderr.print(f"gpulease: job {number} was cancelled")
        except GpuleaseError as error:
            self.stderr.print(
                f"gpulease: job {number} may still be queued: {_clean(error.message)}\n\n"
                f"hint: gpulease cancel {number}"
            )


def _keys_of(options: FollowOptions) -> str:
    """Say what keys do while the job waits."""
    if not options.started:
        return "Ctrl-C leaves it in the queue"
    if not _leaves_by_quit(options):
        return "Ctrl-C cancels"
    return f"Ctrl-C cancels, {name_of_keys(options.keys)} leaves it in the queue"


def _leaves_by_quit(options: FollowOptions) -> bool:
    r"""Tell whether the detach keys begin with Ctrl-\, which a command hears while it waits."""
    return options.keys[:1] == _CTRL_BACKSLASH and is_ours(0)


def _gpus(client: LightClient) -> Sequence[GpuView]:
    """Return the GPUs of the machine; none if they are not known in time."""
    try:
        return client.within(_NAMES_WITHIN).status(queue=0).gpus
    except GpuleaseError:
        return []


def _names_of_gpus(client: LightClient, job: JobView) -> str:
    """Name the GPUs of a job as `status` does."""
    from gpulease.drawing.words import clean, index_of

    found = {gpu.uuid: gpu for gpu in _gpus(client)}
    named = [
        f"GPU {index_of(gpu)} ({clean(gpu.name)})" if (gpu := found.get(lease.gpu)) else lease.gpu
        for lease in job.leases
    ]
    return " and ".join(named) or "a GPU"


def _mode(job: JobView, options: FollowOptions) -> AttachMode:
    return AttachMode(
        label=id_of(job),
        started=options.started,
        watches=options.watches,
        on_terminal=job.terminal,
        keys=options.keys,
    )


def _refused(job: JobView, why: str) -> NotAllowed:
    return NotAllowed(
        f"cannot attach to job {id_of(job)}: {_clean(why)}", "only its owner and root may attach"
    )
