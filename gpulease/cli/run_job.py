"""What `gpulease run` does: queue a job and stay with it, or run it within the lease around it.

Inside a job the command replaces this process, under the lease of the job: a second job would wait
for the first to end, which waits for this command.

The everyday case imports next to nothing; what is rare is imported where it is needed.
"""

from __future__ import annotations

from gpulease.cli.caller import this_process
from gpulease.cli.light_connection import client_or_start
from gpulease.cli.program import resolve, shell_of
from gpulease.cli.render import local_time, print_stderr, print_stdout
from gpulease.cli.request import build
from gpulease.cli.signals import ENDING, Killed, Signals
from gpulease.client.light_client import LightClient
from gpulease.client.submission import Submission, submit
from gpulease.cluster_choice import acts_on_slurm
from gpulease.errors import BadUsage, BadValue, WithinLease
from gpulease.locations import environment
from gpulease.options import RunOptions
from gpulease.record import replace
from gpulease.wire.text import clean, from_wire, to_wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from gpulease.client import Transport
    from gpulease.errors import RecordLocked
    from gpulease.wire.jobs import JobView, NestedView
    from gpulease.wire.requests import SubmitRequest


_SHOWN_AFTER_S = 0.3
"""Once the daemon has said that the job still waits, which takes it 0.2 seconds."""


def run_job(
    options: RunOptions, command: Sequence[str], socket: Path | str | None, *, must_copy: bool
) -> int:
    """Run a command as a job, and return its exit code.

    Args:
        options: the options of `run`.
        command: the command and its arguments; none for a shell.
        socket: the socket of --socket.
        must_copy: whether --snapshot was typed, so that a command without a script is an error.
    """
    if options.array is not None or options.grid:
        options = replace(options, detach=True)  # nobody can attach to many jobs
    _refuse(options, command)
    if options.detach_keys or "GPULEASE_DETACH_KEYS" in environment():
        _keys(options)  # raises before anything has happened, if they cannot be read
    on_slurm = acts_on_slurm(socket, new_lease=options.new_lease)
    request = _request(options, command, on_slurm=on_slurm)
    if options.array is not None and not options.grid:
        from gpulease.cli.array_command import array_doubts

        argv = [from_wire(word) for word in request.argv]
        for text in array_doubts(options.array, command, argv, from_wire(request.cwd)):
            print_stderr(text)
    if options.grid:
        from gpulease.cli.array_command import grid_doubts

        for text in grid_doubts(options.grid, command):
            print_stderr(text)
    if on_slurm or options.slurm:
        return _run_on_slurm(request, options, must_copy=must_copy, on_slurm=on_slurm)
    return _run_here(client_or_start(socket).transport, request, options, must_copy=must_copy)


def _run_here(
    daemon: Transport, request: SubmitRequest, options: RunOptions, *, must_copy: bool
) -> int:
    if options.new_lease or not _asks_first(options):
        request.refuse_nested = not options.new_lease
        try:
            return _run_as_job(daemon, request, options, must_copy=must_copy)
        except WithinLease:
            request.refuse_nested = False
    from gpulease.cli.nested import become, outer_lease
    from gpulease.client import checked

    outer = outer_lease(checked(daemon), request, options)
    if outer is not None and not options.dry:
        become(outer, [from_wire(word) for word in outer.argv or request.argv], options)
    return _run_as_job(daemon, request, options, must_copy=must_copy, outer=outer)


def _asks_first(options: RunOptions) -> bool:
    """Tell whether to ask for a lease around this process before anything else is done.

    Otherwise the daemon is asked to queue the job if there is none: one request in place of two.
    """
    variables = environment()
    is_preset = bool(variables.get("CUDA_VISIBLE_DEVICES")) and not options.gpu
    is_within = "GPULEASE_JOB" in variables
    return is_within or is_preset or bool(options.snapshot or options.snapshot_dir or options.after)


def _run_on_slurm(
    request: SubmitRequest, options: RunOptions, *, must_copy: bool, on_slurm: bool
) -> int:
    if not on_slurm:
        raise BadUsage(
            "cannot use --slurm: this machine is not part of a cluster",
            'its admins set cluster = "slurm" in /etc/gpulease/config.toml; see docs/cluster.md',
        )
    from gpulease.slurm.command.run import run_on_cluster

    if options.dry:
        _check_copy(request, options)
    else:
        _run_a_copy(request, options, must=must_copy)
    return run_on_cluster(request, options)


def _run_as_job(
    daemon: Transport,
    request: SubmitRequest,
    options: RunOptions,
    *,
    must_copy: bool,
    outer: NestedView | None = None,
) -> int:
    if outer is None:
        complete(daemon, request, options)
    if options.dry:
        from gpulease.cli.show_jobs import dry_run
        from gpulease.client.light_client import LightClient

        _check_copy(request, options)
        return dry_run(LightClient(daemon), request, outer, json=options.json)
    _run_a_copy(request, options, must=must_copy)
    return submit_and_follow(daemon, request, options)


def _request(options: RunOptions, command: Sequence[str], *, on_slurm: bool) -> SubmitRequest:
    caller = this_process()
    if options.shell:
        command = [shell_of(caller.environment)]
    request = build(options, command, caller)
    if request.terminal is None and not options.detach and caller.streams.stdout:
        # Python would buffer output to the pipe of the job, though it is shown on a terminal here.
        request.environment = {"PYTHONUNBUFFERED": "1", **request.environment}
    set_begin(request, options)
    is_here_and_now = not (on_slurm or options.after or options.begin or options.held)
    found = resolve(command, caller.cwd, caller.environment, must_exist=is_here_and_now)
    request.argv = [to_wire(word) for word in found]
    return request


def set_begin(request: SubmitRequest, options: RunOptions) -> None:
    """Set the instant before which a job does not start, if there is one."""
    if options.begin is not None:
        from gpulease.cli.resolved_options import begin_instant

        request.queue.begin_at = begin_instant(options.begin, local_time())


def complete(daemon: Transport, request: SubmitRequest, options: RunOptions) -> None:
    """Add what concerns a job of its own only, and not a command within a lease."""
    if options.after:
        from gpulease.cli.resolved_options import dependencies

        request.queue.after = dependencies(LightClient(daemon), options.after)
    if request.notify:
        from gpulease.cli.resolved_options import completed

        request.notify = completed(request.notify)
    if not options.gpu and environment().get("CUDA_VISIBLE_DEVICES"):
        from gpulease.cli.messages import preset_devices

        if (text := preset_devices(environment())) is not None:
            print_stderr(text)


def _refuse(options: RunOptions, command: Sequence[str]) -> None:
    """Refuse options that contradict each other, and a line without a command."""
    if not command and not options.shell:
        raise BadUsage(
            "cannot run: no COMMAND is given", "gpulease run --mem 4G train.py, or --shell"
        )
    if command and options.shell:
        raise BadValue(
            f"cannot run both a shell and {command[0]}: --shell takes no command",
            "leave out --shell to run the command, or type the command into the shell",
        )
    if options.array is not None or options.grid:
        many = "--array" if options.array is not None else "--grid"
        for option, is_given in (("--shell", options.shell), ("--no-wait", options.no_wait)):
            if is_given:
                raise BadValue(
                    f"cannot use {many} and {option} together",
                    "the elements of an array run in the background, each when there is room",
                )
    if options.end_with_command and options.detach:
        raise BadValue(
            "cannot use --end-with-command in the background: this command ends at once",
            "leave out -d, or leave out --end-with-command",
        )
    if options.json and not options.dry:
        raise BadValue(
            "cannot use --json without --dry-run: the output is that of the command",
            "gpulease show --json JOB prints a job as JSON",
        )


def _check_copy(request: SubmitRequest, options: RunOptions) -> None:
    """Refuse a directory that could not be copied, without a copy."""
    if options.snapshot_dir is not None:
        from pathlib import Path

        from gpulease.cli.snapshot import directory_to_copy

        argv = [from_wire(word) for word in request.argv]
        directory_to_copy(options.snapshot_dir, argv, Path(from_wire(request.cwd)))


def _run_a_copy(request: SubmitRequest, options: RunOptions, *, must: bool) -> None:
    """Run the copy of the script or of the directory, if that was asked for."""
    if not options.snapshot and options.snapshot_dir is None:
        return
    from pathlib import Path

    from gpulease.cli.snapshot import take_directory, take_snapshot

    variables = {from_wire(key): from_wire(value) for key, value in request.environment.items()}
    argv = [from_wire(word) for word in request.argv]
    cwd = Path(from_wire(request.cwd))
    if options.snapshot_dir is not None:
        argv, cwd, variables = take_directory(options.snapshot_dir, argv, cwd, variables)
        request.cwd = to_wire(str(cwd))
        print_stderr(f"gpulease: the job runs in a copy, {clean(str(cwd))}")
    else:
        argv, variables = take_snapshot(argv, cwd, variables, must=must)
    request.argv = [to_wire(word) for word in argv]
    request.environment = {to_wire(key): to_wire(value) for key, value in variables.items()}


class LockedNote:
    """Says once that a submission waits for a locked database; a signal ends the wait."""

    def __init__(self, signals: Signals | None = None) -> None:
        self._signals = signals
        self._is_said = False

    def __call__(self, error: RecordLocked) -> None:
        if not self._is_said:
            print_stderr(f"gpulease: {error.message}; waiting until it is free (at most 5 minutes)")
        self._is_said = True
        for signum in () if self._signals is None else self._signals.take():
            if signum in ENDING:
                raise Killed(signum)


def submit_and_follow(
    daemon: Transport, request: SubmitRequest, options: RunOptions, again: str | None = None
) -> int:
    """Queue a job and stay with it, or print its number with -d; return the exit code.

    `again` is the job that this one repeats.
    """
    if options.detach:
        job = submit(replace(daemon, locked=LockedNote()), request)
        _say_default(job, options, request)
        print_stdout(str(job.id))
        if again:
            print_stderr(f"job {job.label or job.id} · again of {again}")
        _say_more(job, options)
        return 0
    with Signals() as signals:
        submission = Submission(replace(daemon, locked=LockedNote(signals)))
        try:
            # While the daemon commits, there is time for what follows.
            job = submission.submit(request, meanwhile=_import_follow)
        except WithinLease:
            for signum in signals.take():
                if signum in ENDING:
                    raise Killed(signum) from None
            raise
        _say_default(job, options, request)
        from gpulease.cli.follow import FollowOptions, follow
        from gpulease.cli.job_watch import stderr_status

        how = FollowOptions(
            keys=_keys(options),
            is_shell=options.shell,
            may_run_again=bool(options.retry_oom or options.retries or options.requeue),
            verbose=options.verbose,
            summary=options.summary,
            desktop=options.desktop,
            again=again,
        )
        stderr = stderr_status(_SHOWN_AFTER_S, quiet=options.quiet)
        return follow(LightClient(daemon), job, signals, stderr, how, submission)


def _import_follow() -> None:
    import gpulease.cli.follow  # noqa: F401


def _keys(options: RunOptions) -> bytes:
    from gpulease.cli.attachment import detach_sequence

    return detach_sequence(options.detach_keys, environment())


def _say_default(job: JobView, options: RunOptions, request: SubmitRequest) -> None:
    claim = request.claim
    if options.quiet:
        return
    if job.claim.linked and job.claim.gpus == 1:
        print_stderr("gpulease: --linked has no effect on one GPU; ask for several with --gpus")
    if claim.memory is not None or claim.share is not None:
        return
    from gpulease.drawing.words import id_of, requested

    if job.sized:
        print_stderr(f"gpulease: {clean(job.sized)}; to ask for another size, use --mem")
    else:
        print_stderr(f"gpulease: job {id_of(job)} leases the default, {requested(job)}; see --mem")
    if "--mem" in request.argv:
        print_stderr("gpulease: --mem after the command was passed to the command")


def _say_more(job: JobView, options: RunOptions) -> None:
    if options.summary:
        print_stderr(f"gpulease: no --summary in the background; see gpulease show {job.id}")
    if options.array is not None or options.grid:
        from gpulease.drawing.words import id_of

        print_stderr(
            f"gpulease: array {job.id} is queued, from {id_of(job)} on; "
            f"gpulease show {job.id} sums it up, gpulease logs {id_of(job)} shows output"
        )
