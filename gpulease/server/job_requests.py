"""Requests about jobs, every field checked: submissions, and new values for waiting jobs.

Nothing here looks at the machine: `service.submission` decides whether it can grant the claim.
"""

import shlex
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from fractions import Fraction
from pathlib import PurePosixPath
from typing import Any

from gpulease.domain.array_values import Grid, suffix_of
from gpulease.domain.array_values import size_of as size_of_grid
from gpulease.domain.job import EarlySignal, Invocation, Job, JobUsage, TerminalSettings
from gpulease.domain.lease import Claim, State
from gpulease.domain.queue_options import Indices
from gpulease.errors import BadValue
from gpulease.fingerprint import fingerprint_of
from gpulease.server.auth import Caller
from gpulease.server.validation import (
    Defaults,
    bytes_string,
    checked_key,
    claim_of,
    dependencies_of,
    environment_of,
    gpu_names,
    indices_of,
    notified_of,
    options_of,
    queue_options_of,
    refuse,
    refuse_oversized_exec,
    size_of,
    span,
    within,
)
from gpulease.service.editing import Edit
from gpulease.service.ports import Submission
from gpulease.units import Share, format_span
from gpulease.wire.ranges import checked_name, written_span
from gpulease.wire.requests import (
    LARGEST_RETRY,
    LONGEST_NAME,
    MOST_ELEMENTS,
    ClaimRequest,
    EarlySignalRequest,
    EditRequest,
    QueueRequest,
    SubmitRequest,
    TerminalRequest,
    WorkerOptionsRequest,
    to_wire,
)
from gpulease.wire.text import clean

LONGEST_COMMAND = 4096
"""Characters of a command line that listings show; the arguments themselves are never cut."""
_LONGEST_PATH = 4096
_MOST_NAMES = 20
_LONGEST_VALUE = 1000
_MOST_ATTRIBUTES = 64
_LARGEST_ATTRIBUTE = (1 << 32) - 1
_UNCATCHABLE = frozenset({signal.SIGKILL, signal.SIGSTOP})


def submission_of(
    request: SubmitRequest, caller: Caller, defaults: Defaults, *, is_admin: bool = False
) -> Submission:
    """Return the submission of a job, or of an array of jobs.

    Raises:
        BadValue: a field is out of range.
        NotAllowed: only admins may ask for it.
        TooLarge: a field exceeds its limit.
    """
    argv = tuple(bytes_string("argument", each) for each in request.argv)
    if not argv or not argv[0]:
        raise BadValue("cannot submit: no command is given", "gpulease run COMMAND...")
    environment = environment_of(request.environment)
    refuse_oversized_exec(argv, environment)
    asked = request.claim
    claim = claim_of(asked, defaults)
    grid = _grid(request.grid)
    indices = _indices(request.queue.array, grid)
    if indices is not None and request.attached:
        refuse("nobody can attach to all elements of an array", "set attached to false")
    if request.ends_with_client and not request.attached:
        refuse("the job would end with a client, and none will attach", "set attached to true")
    return Submission(
        owner=caller.owner,
        name=_default_name(argv) if request.name is None else checked_name(request.name),
        command=shown_command(argv),
        claim=claim,
        invocation=Invocation(
            argv=argv,
            cwd=_directory(request.cwd),
            environment=environment,
            umask=within("umask", request.umask, 0, 0o777),
            soft_limits=_soft_limits(request.soft_limits),
            nice=within("nice", request.nice, -20, 19),
            attached=request.attached,
            options=options_of(request.options, size_of(request.claim)),
            groups=caller.groups,
            terminal=_terminal(request.terminal),
            early_signal=_early_signal(request.early_signal, claim),
            grace=span(
                "grace",
                request.grace,
                defaults.longest_grace,
                hint="the admin sets the longest with longest_grace in the settings",
            ),
            ends_with_client=request.ends_with_client,
            grid=grid,
        ),
        wait_for=span("wait", request.wait),
        key=checked_key(request.key),
        usage=JobUsage(
            fingerprint=fingerprint_of(argv, request.cwd), retry_factor=_retry(request.retry_oom)
        ),
        sizes_itself=asked.memory is None and asked.share is None and not asked.exclusive,
        queue=queue_options_of(request.queue, is_admin=is_admin),
        after=dependencies_of(request.queue.after),
        indices=indices,
        named=gpu_names(request.claim.named),
        notify=notified_of(request.notify),
    )


def _grid(asked: Mapping[str, Sequence[str]]) -> Grid:
    if not asked:
        return {}
    if len(asked) > _MOST_NAMES:
        refuse(f"{len(asked)} names of values are too many (the limit is {_MOST_NAMES})")
    for name, values in asked.items():
        if not (name.isascii() and name.isidentifier()) or name.startswith("GPULEASE"):
            refuse(
                f"{name[:40]!r} cannot name values: it is no name of a variable", "--grid lr=1,2"
            )
        if not values:
            refuse(f"{name[:40]} has no values", "--grid lr=1e-3,1e-4")
    grid = {name: tuple(bytes_string(name, each) for each in asked[name]) for name in asked}
    if any(len(each) > _LONGEST_VALUE for values in grid.values() for each in values):
        refuse(f"a value has more than {_LONGEST_VALUE} characters", "pass a name of a file")
    if (count := size_of_grid(grid)) > MOST_ELEMENTS:
        refuse(f"{count} combinations are too many (the limit is {MOST_ELEMENTS})")
    return grid


def _indices(array: str | None, grid: Grid) -> Indices | None:
    """Return the indices of an array; of a grid, all if none are given."""
    indices = indices_of(array)
    if not grid:
        return indices
    count = size_of_grid(grid)
    if indices is not None and max(indices.indices) >= count:
        refuse(f"there are {count} combinations", f"indices from 0 to {count - 1}")
    return indices or Indices(tuple(range(count)))


def why_not_again(job: Job) -> tuple[str, str] | None:
    """Return why a job cannot be submitted once more, and a hint; None if it can."""
    if job.holder is not None:
        return "it was a lease without a command", "gpulease hold leases memory for this shell"
    if job.slurm is not None:
        return "Slurm runs it", f"scontrol requeue {job.slurm.id}"
    if job.state is not State.ENDED:
        return "it has not ended", f"gpulease requeue {job.label} stops it and queues it again"
    if (now := job.usage.retried_as) is not None:
        return f"job {now} continues it", f"gpulease show {now}, or gpulease again {now}"
    return None


def request_of(job: Job, invocation: Invocation) -> SubmitRequest:
    """Return the request for the same work as that of a job, without an environment.

    Left out is when it may start, and what the caller has by itself. An element of an array is an
    array with its index.
    """
    claim, queue, early = job.claim, job.queue, invocation.early_signal
    options: dict[str, Any] = dict(invocation.options)  # checked at submission
    name = job.name
    if queue.array is not None:
        name = name.removesuffix(suffix_of(invocation.grid, queue.array.index))
    chosen = None if job.usage.size_reason else claim.memory
    memory, share = _bytes_and_percent(chosen)
    bound, bound_share = _bytes_and_percent(claim.memory_bound)
    return SubmitRequest(
        argv=[to_wire(each) for each in invocation.argv],
        cwd=to_wire(invocation.cwd),
        environment={},
        claim=ClaimRequest(
            memory, share, claim.gpus, claim.exclusive, _seconds(claim.time_limit),
            list(claim.named), claim.model, claim.min_vram, claim.same_model, bound, bound_share,
            claim.ram, claim.cpus, claim.linked,
        ),
        options=WorkerOptionsRequest(**options),
        name=name,
        grid={each: list(map(to_wire, values)) for each, values in invocation.grid.items()},
        attached=invocation.attached,
        ends_with_client=invocation.ends_with_client,
        early_signal=None
        if early is None
        else EarlySignalRequest(early.signal, early.before.total_seconds()),
        grace=_seconds(invocation.grace),
        queue=QueueRequest(
            priority=queue.priority.value, nice=queue.nice,
            array=None if queue.array is None else str(queue.array.index),
            requeue=queue.requeue, preemptible=queue.preemptible, retries=queue.retries,
            retry_on=list(queue.retry_on),
            retry_delay=_seconds(queue.retry_delay) if queue.retries else None,
        ),
        retry_oom=None if job.usage.retry_factor is None else float(job.usage.retry_factor),
        notify=list(job.notify),
    )  # fmt: skip


def _bytes_and_percent(memory: int | Share | None) -> tuple[int | None, float | None]:
    return (None, float(memory.percent)) if isinstance(memory, Share) else (memory, None)


def _seconds(span: timedelta | None) -> float | None:
    return None if span is None else span.total_seconds()


def edit_of(asked: EditRequest, *, is_admin: bool) -> Edit:
    """Return the new values of waiting jobs.

    Raises:
        BadValue: a field is out of range, or none is given.
        NotAllowed: only admins may ask for it.
    """
    if replace(asked, jobs=[], only_waiting=False) == EditRequest([]):
        raise BadValue("cannot edit: nothing is to change", "gpulease edit 17 --mem 6G")
    given = ClaimRequest(
        asked.memory,
        asked.share,
        1 if asked.gpus is None else asked.gpus,
        model=asked.model or None,
        min_vram=asked.min_vram or None,
        same_model=bool(asked.same_model),
        linked=bool(asked.linked),
        memory_bound=asked.memory_bound,
        share_bound=asked.share_bound,
        ram=asked.ram or None,
        cpus=asked.cpus or None,
    )
    has_limit = asked.time_limit not in (None, 0)
    claim = claim_of(replace(given, time_limit=asked.time_limit if has_limit else None), _ANY)
    begins_now = asked.begin_at == "now"
    queue = queue_options_of(
        QueueRequest(
            priority=asked.priority or "normal",
            nice=asked.nice or 0,
            held=bool(asked.held),
            begin_at=None if begins_now else asked.begin_at,
            retries=asked.retries or 0,
        ),
        is_admin=is_admin,
    )
    names = ("gpus", "time_limit", "model", "min_vram", "same_model", "ram", "cpus", "linked")
    changed: dict[str, object] = {each: getattr(claim, each) for each in names}
    if asked.memory is not None or asked.share is not None:
        changed |= {"memory": claim.memory, "memory_bound": claim.memory_bound}
    options = {each: getattr(queue, each) for each in _EDITED}
    return Edit(
        claim=_given(changed, asked),
        options=_given(options, asked),
        name=None if asked.name is None else checked_name(asked.name),
        after=None if asked.after is None else dependencies_of(asked.after),
        named=None if asked.named is None else gpu_names(asked.named),
        by_admin=is_admin,
    )


_EDITED = ("priority", "nice", "held", "begin_at", "retries")
_ANY = Defaults(1)
"""For a claim of which only the given fields are used."""


def _given(values: Mapping[str, object], asked: EditRequest) -> dict[str, object]:
    """Return the values whose fields are given; a share is given as memory."""
    return {
        name: value
        for name, value in values.items()
        if name in ("memory", "memory_bound") or getattr(asked, name) is not None
    }


def _retry(factor: float | None) -> Fraction | None:
    if factor is None:
        return None
    if not 1 < factor <= LARGEST_RETRY:
        raise BadValue.of_field(
            "retry_oom",
            f"{factor:g}x",
            f"the factor must be above 1 and at most {LARGEST_RETRY:g}",
            "for 50% more memory at each retry: --retry-oom 1.5x",
        )
    return Fraction(factor).limit_denominator(1000)


def _default_name(argv: tuple[str, ...]) -> str:
    """Name a job after its script, or else after its command."""
    script = next((each for each in argv[1:] if not each.startswith("-")), "")
    named_after = script if script.endswith((".py", ".sh")) else argv[0]
    return clean(PurePosixPath(named_after).name or argv[0])[:LONGEST_NAME]


def shown_command(argv: tuple[str, ...]) -> str:
    """Return a command line as listings show it."""
    shown = ""
    for each in argv:
        shown += ("" if not shown else " ") + shlex.quote(each[:LONGEST_COMMAND])
        if len(shown) > LONGEST_COMMAND:
            shown = shown[: LONGEST_COMMAND - 3] + "..."
            break
    return clean(shown)


def _directory(path: str) -> str:
    directory = bytes_string("working directory", path)
    if not directory.startswith("/") or len(path) > _LONGEST_PATH:
        refuse("the working directory is not an absolute path")
    return directory


def _soft_limits(given: Mapping[str, int]) -> Mapping[str, int]:
    for name, value in given.items():
        if not name.startswith("RLIMIT_") or not name.isascii() or len(name) > 32:
            refuse(f"{name[:40]!r} is not a resource limit")
        within(f"soft_limits.{name}", value, -1, (1 << 63) - 1)
    return given


def _terminal(asked: TerminalRequest | None) -> TerminalSettings | None:
    if asked is None:
        return None
    attributes = asked.attributes
    if attributes is not None:
        within("terminal.attributes", len(attributes), 6, _MOST_ATTRIBUTES)
        for each in attributes:
            within("terminal.attributes", each, 0, _LARGEST_ATTRIBUTE)
    return TerminalSettings(
        within("terminal.rows", asked.rows, 1, 65535),
        within("terminal.columns", asked.columns, 1, 65535),
        None if attributes is None else tuple(attributes),
        asked.stderr,
    )


def _early_signal(asked: EarlySignalRequest | None, claim: Claim) -> EarlySignal | None:
    if asked is None:
        return None
    # Signals of real time between the first and the last have numbers only.
    names = {int(each): each.name.removeprefix("SIG") for each in signal.Signals}
    name = names.get(asked.signal, str(asked.signal))
    if asked.signal not in signal.valid_signals() - _UNCATCHABLE:
        raise BadValue.of_field(
            "early_signal",
            name,
            "no program can catch it",
            "use a signal that the program handles, such as USR1",
        )
    if claim.time_limit is None:
        raise BadValue.of_field(
            "early_signal",
            f"{name}@{written_span(asked.before)}",
            "the job has no time limit",
            "add a time limit, such as --time 4h",
        )
    if not 0 < asked.before < claim.time_limit.total_seconds():
        raise BadValue.of_field(
            "early_signal",
            f"{name}@{written_span(asked.before)}",
            f"the time limit is only {format_span(claim.time_limit)}",
            "after the @ stands how long before the time limit the signal is sent",
        )
    return EarlySignal(asked.signal, timedelta(seconds=asked.before))
