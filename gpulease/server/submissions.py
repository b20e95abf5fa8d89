"""A submission as it came over the wire, checked against every bound, as an order for a job.

Nothing here looks at the machine; that a claim can be met is the business of the queue.

A lease without a job as it was asked for over the wire, checked, as an order.
"""

import shlex
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from fractions import Fraction
from pathlib import PurePosixPath

from gpulease.domain.gpu import JobId
from gpulease.domain.job import (
    EarlySignal,
    Holder,
    Invocation,
    Job,
    JobUsage,
    Process,
    TerminalSettings,
)
from gpulease.domain.lease import Claim, State
from gpulease.domain.memory_estimate import fingerprint_of
from gpulease.errors import AlreadyLeased, BadValue, NotAllowed, WrongState
from gpulease.server.auth import Caller
from gpulease.server.validation import (
    LONGEST_NAME,
    Defaults,
    bytes_string,
    checked_key,
    checked_name,
    claim_of,
    environment_of,
    options_of,
    owner_of,
    printable,
    refuse,
    refuse_more_than_exec_takes,
    span,
    within,
)
from gpulease.service.idleness import KEPT_FOR, LONGEST_KEPT
from gpulease.service.ports import LivingProcess, Submission
from gpulease.setting_parsers import LONGEST_GRACE
from gpulease.units import format_span
from gpulease.wire.requests import (
    CancelRequest,
    ClaimRequest,
    EarlySignalRequest,
    HoldRequest,
    KeepRequest,
    SubmitRequest,
    TerminalRequest,
    to_wire,
)
from gpulease.wire.views import EnvironmentView

LONGEST_COMMAND = 4096
"""Characters of the command line that are kept to be shown; what is executed is never cut."""
LARGEST_RETRY = 4.0
"""How much more memory a job may have at its next try."""
_LONGEST_PATH = 4096
_MOST_ATTRIBUTES = 64
_LARGEST_ATTRIBUTE = (1 << 32) - 1
_CANNOT_BE_HEARD = frozenset({signal.SIGKILL, signal.SIGSTOP})


def order_of(request: SubmitRequest, caller: Caller, defaults: Defaults) -> Submission:
    """Return what `caller` asks for.

    Raises:
        BadValue: a field cannot be what it is.
        TooLarge: a field is past its bound.
    """
    argv = tuple(bytes_string("argument", each) for each in request.argv)
    if not argv or not argv[0]:
        raise BadValue("cannot run nothing: there is no command", "gpulease run COMMAND...")
    environment = environment_of(request.environment)
    refuse_more_than_exec_takes(argv, environment)
    claim = claim_of(request.claim, defaults)
    return Submission(
        owner=owner_of(caller),
        name=_default_name(argv) if request.name is None else checked_name(request.name),
        command=_shown(argv),
        claim=claim,
        invocation=Invocation(
            argv=argv,
            cwd=_directory(request.cwd),
            environment=environment,
            umask=within("umask", request.umask, 0, 0o777),
            soft_limits=_soft_limits(request.soft_limits),
            nice=within("nice level", request.nice, -20, 19),
            attached=request.attached,
            options=options_of(request.options),
            groups=caller.groups,
            terminal=_terminal(request.terminal),
            early_signal=_early_signal(request.early_signal, claim),
            grace=_grace(request.grace, defaults.longest_grace),
        ),
        wait_for=span("time to wait", request.wait, at_least=0),
        key=checked_key(request.key),
        usage=JobUsage(
            fingerprint=fingerprint_of(argv, request.cwd), retry_factor=_retry(request.retry_oom)
        ),
        sizes_itself=_names_no_size(request.claim),
    )


def _names_no_size(asked: ClaimRequest) -> bool:
    return asked.memory is None and asked.share is None and not asked.exclusive


def _retry(factor: float | None) -> Fraction | None:
    if factor is None:
        return None
    if not 1 < factor <= LARGEST_RETRY:
        refuse(
            f"{factor:g} times the memory is no way to try again",
            f"name a factor above 1 and at most {LARGEST_RETRY:g}, such as --retry-oom 1.5x",
        )
    return Fraction(factor).limit_denominator(1000)


def cancel_grace_of(request: CancelRequest, job: Job) -> timedelta | None:
    """Return the grace that a cancel of `job` gives it, at most as long as its own.

    Raises:
        BadValue: it is none.
    """
    if request.grace is None:
        return None
    if not 0 <= request.grace <= LONGEST_GRACE.total_seconds():
        raise BadValue(
            f"cannot cancel job {job.id} with a grace of {request.grace:g} seconds: "
            "it is out of range",
            "a cancel can only shorten the job's own grace: --grace 5s",
        )
    return timedelta(seconds=request.grace)


def keep_span_of(request: KeepRequest, job: Job) -> timedelta:
    """Return for how long a job is to be kept.

    Raises:
        BadValue: that is no time.
    """
    if request.span is None:
        return KEPT_FOR
    if not 0 < request.span <= LONGEST_KEPT.total_seconds():
        raise BadValue(
            f"cannot keep job {job.id} for so long: at most a day can be asked for"
            if request.span > 0
            else f"cannot keep job {job.id} for {request.span:g} seconds: that is no time",
            f"it can be said again: gpulease keep {job.id} --for 1d",
        )
    return timedelta(seconds=request.span)


def _default_name(argv: tuple[str, ...]) -> str:
    """Name a job after its script, or else after its command."""
    script = next((each for each in argv[1:] if not each.startswith("-")), "")
    named_after = script if script.endswith((".py", ".sh")) else argv[0]
    return printable(PurePosixPath(named_after).name or argv[0])[:LONGEST_NAME]


def _shown(argv: tuple[str, ...]) -> str:
    shown = ""
    for each in argv:
        shown += ("" if not shown else " ") + shlex.quote(each[:LONGEST_COMMAND])
        if len(shown) > LONGEST_COMMAND:
            shown = shown[: LONGEST_COMMAND - 3] + "..."
            break
    return printable(shown)


def _directory(path: str) -> str:
    directory = bytes_string("working directory", path)
    if not directory.startswith("/") or len(path) > _LONGEST_PATH:
        refuse("the working directory is not an absolute path")
    return directory


def _soft_limits(given: Mapping[str, int]) -> Mapping[str, int]:
    for name, value in given.items():
        if not name.startswith("RLIMIT_") or not name.isascii() or len(name) > 32:
            refuse(f"{name[:40]!r} is no resource limit")
        within(name, value, -1, (1 << 63) - 1)
    return given


def _terminal(asked: TerminalRequest | None) -> TerminalSettings | None:
    if asked is None:
        return None
    attributes = asked.attributes
    if attributes is not None:
        within("number of terminal attributes", len(attributes), 6, _MOST_ATTRIBUTES)
        for each in attributes:
            within("terminal attribute", each, 0, _LARGEST_ATTRIBUTE)
    return TerminalSettings(
        within("number of rows", asked.rows, 1, 65535),
        within("number of columns", asked.columns, 1, 65535),
        None if attributes is None else tuple(attributes),
        asked.stderr,
    )


def _early_signal(asked: EarlySignalRequest | None, claim: Claim) -> EarlySignal | None:
    if asked is None:
        return None
    if asked.signal not in signal.valid_signals() - _CANNOT_BE_HEARD:
        refuse(
            f"{asked.signal} is no signal that a job could hear",
            "name one that it can catch, such as --signal USR1@120",
        )
    if claim.time_limit is None:
        refuse(
            "there is no time limit that a signal could come before",
            "give one with --time, or leave out --signal",
        )
    if not 0 < asked.before < claim.time_limit.total_seconds():
        refuse(
            "the early signal would not come within the time limit",
            "with --time 4h, --signal USR1@120 comes two minutes before the end",
        )
    return EarlySignal(asked.signal, timedelta(seconds=asked.before))


def _grace(seconds: float | None, longest: timedelta) -> timedelta | None:
    if seconds is None:
        return None
    if not 0 <= seconds <= longest.total_seconds():
        refuse(
            f"a grace of {seconds:g} seconds is out of range",
            f"it is at most {format_span(longest)} here; an admin may allow more (longest_grace)",
        )
    return timedelta(seconds=seconds)


Living = Callable[[int], LivingProcess | None]
"""Finds the process that has a pid now."""
JobsOf = Callable[[Iterable[int], Sequence[Job]], Mapping[int, JobId]]
"""Finds the job of each pid that belongs to one of some jobs."""

_LARGEST_PID = 1 << 22


def hold_order_of(
    request: HoldRequest, caller: Caller, defaults: Defaults, living: Living
) -> Submission:
    """Return what `caller` asks for.

    Raises:
        BadValue: a field cannot be what it is, or nothing would ever end the lease.
        TooLarge: a field is past its bound.
        NotAllowed: the process that is to hold it is somebody else's.
    """
    environment = environment_of(request.environment)
    refuse_more_than_exec_takes((), environment)
    claim = claim_of(request.claim, defaults)
    process, shown = _holder(request.pid, caller, living)
    if process is None and claim.time_limit is None:
        raise BadValue(
            "cannot hold a lease for ever: no process is named whose end would release it, "
            "and there is no time limit",
            "name a process, or give a time with --for 2h",
        )
    return Submission(
        owner=owner_of(caller),
        name="hold" if request.name is None else checked_name(request.name),
        command=shown,
        claim=claim,
        invocation=Invocation((), "/", environment, options=options_of(request.options)),
        wait_for=span("time to wait", request.wait, at_least=0),
        holder=Holder(process, _asker(caller, living)),
        key=checked_key(request.key),
    )


def refuse_within_a_job(holder: Holder | None, live: Sequence[Job], jobs_of: JobsOf) -> None:
    """Check that a lease is not for a process of a job, whosever: that one has a lease.

    Where no process is named, the lease is for whoever asks. Reads /proc.

    Raises:
        AlreadyLeased: it is.
    """
    for_whom = None if holder is None else holder.process or holder.waiting_client
    if for_whom is None:
        return
    running = [job for job in live if job.holder is None and job.holds_memory]
    job = jobs_of([for_whom.pid], running).get(for_whom.pid)
    if job is not None:
        raise AlreadyLeased(
            f"cannot hold a lease for process {for_whom.pid}: it belongs to job {job}, "
            "which has one",
            f"its own lease is in force there, gpulease show {job} tells it; for more memory, "
            "start the job with more: gpulease run --mem",
        )


def _holder(pid: int | None, caller: Caller, living: Living) -> tuple[Process | None, str]:
    """Return the process that is to hold the lease, and how to say so."""
    if pid is None:
        return None, "held until its time is over"
    found = living(within("pid", pid, 1, _LARGEST_PID))
    if found is None:
        raise BadValue(
            f"cannot hold a lease for process {pid}: there is no such process",
            "a shell names itself as $$; it must run on this machine, outside any container",
        )
    if caller.uid not in (0, found.uid):
        raise NotAllowed(
            f"cannot hold a lease for process {pid}: it belongs to another user",
            "name a process of your own",
        )
    return found.process, f"held by pid {pid} ({printable(found.name)})"


def _asker(caller: Caller, living: Living) -> Process | None:
    # The kernel says 0 for a caller whom the daemon cannot see, as from another container.
    found = living(caller.pid) if caller.pid > 0 else None
    return None if found is None else found.process


def environment_view(
    before: Mapping[str, str], under_the_lease: Mapping[str, str]
) -> EnvironmentView:
    """Return what a lease changes in the environment of its holder."""
    changed = {name: it for name, it in under_the_lease.items() if before.get(name) != it}
    return EnvironmentView(
        set={to_wire(name): to_wire(value) for name, value in changed.items()},
        unset=[to_wire(name) for name in before if name not in under_the_lease],
    )


def refuse_to_tell(job: Job) -> None:
    """Check that `job` has an environment to tell: that of a lease which it holds.

    Raises:
        WrongState: it waits for its lease, or has given it back.
    """
    if not job.holds_memory:
        why = "it waits for its GPU" if job.state is State.QUEUED else "it has ended"
        raise WrongState(
            f"cannot tell the environment of job {job.id}: {why}",
            f"gpulease show {job.id} tells more",
        )
