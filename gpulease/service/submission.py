"""Submission of jobs: checks of claims and quotas, and the size of leases that name none."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from gpulease.domain.gpu import GpuMemory
from gpulease.domain.job import Job
from gpulease.domain.lease import Claim, State, Trigger
from gpulease.domain.memory_estimate import MOST_RUNS, PastRun, deciding_run, size_for
from gpulease.domain.plan import plan, why_waiting
from gpulease.domain.snapshot import ledgers
from gpulease.errors import BadValue, NoRoomNow
from gpulease.fingerprint import script_name
from gpulease.service import dependencies
from gpulease.service.observation import Observation, snapshot
from gpulease.service.ports import (
    Clock,
    Event,
    Policy,
    Store,
    Submission,
    Transaction,
)
from gpulease.service.queue_state import QueueState
from gpulease.service.refusals import (
    largest,
    largest_for,
    refuse_beyond_host,
    refuse_one_more,
    refuse_over_limit,
    refuse_second_lease,
    refuse_too_much,
    refuse_what_can_never_start,
    refuses_more,
    uuids_of,
    with_time_limit,
)
from gpulease.service.transactions import change_jobs
from gpulease.units import counted, format_size


def sized(
    submission: Submission, tx: Transaction, gpus: Sequence[GpuMemory], policy: Policy
) -> Submission:
    """Return `submission`; if it names no size, with the size that similar runs of the user needed.

    The size is at most what `gpus` offer when they are empty, and at least the smallest lease.
    """
    fingerprint = submission.usage.fingerprint
    if not submission.sizes_itself or fingerprint is None:
        return submission
    runs = tx.past_runs(submission.owner.uid, fingerprint, submission.claim.gpus, MOST_RUNS)
    wanted = size_for(runs)
    if wanted is None:
        return submission
    memory = max(policy.smallest_lease, min(wanted, largest_for(submission.claim, gpus) or wanted))
    return replace(
        submission,
        claim=replace(submission.claim, memory=memory),
        usage=replace(submission.usage, size_reason=_because(submission, runs, memory)),
    )


def most_of(seen: Observation | None, policy: Policy, claim: Claim, at: datetime) -> int:
    """Return the largest lease that a claim could get if no other job ran, in bytes."""
    if seen is None:
        return 0
    return largest_for(claim, ledgers(snapshot((), seen, policy, {}, at)))


def _because(submission: Submission, runs: Sequence[PastRun], memory: int) -> str:
    size = format_size(memory)
    script = script_name(submission.invocation.argv, submission.invocation.cwd) or submission.name
    run = deciding_run(runs)
    assert run is not None, "these runs decided the size"
    lease, used = format_size(run.leased), format_size(run.used)
    if run.out_of_memory:
        return f"{size}, since {script} ran out of memory in {lease}"
    if run.fell_short:
        return f"{size}, since {script} was stopped for holding {used} in a lease of {lease}"
    return f"{size}, since {script} used up to {used} in {_count(runs, run)}"


def _count(runs: Sequence[PastRun], run: PastRun) -> str:
    """Return how many runs used at most as much as `run`, as text."""
    within = sum(each.used <= run.used for each in runs)
    if within < len(runs):
        return f"{within} of {len(runs)} runs"
    return counted(len(runs), "run")


def submit(
    store: Store,
    submission: Submission,
    seen: Observation,
    policy: Policy,
    clock: Clock,
    state: QueueState | None = None,
) -> Job:
    """Queue a job, and return it when it is on disk; for a known key, return the first job.

    Raises:
        AlreadyLeased: the process of a hold has a lease, and may have only one.
        BadValue: its time limit is longer than its user may have, or its key is that of a job and
            not of a lease without one, or the other way round.
        CannotLease: this machine can never grant the claim, or never to this user.
        NoRoomNow: the job would have to wait, but must not.
        TooMany: the user has reached a quota or a limit.
    """
    state = state or QueueState(store)
    # Before the transaction: a directory server may be asked for the user's groups. It is cached.
    policy.limits(submission.owner)
    with change_jobs(store) as tx:
        before = (
            tx.job_by_key(submission.owner.uid, submission.key)
            if submission.key is not None
            else None
        )
        if before is not None:
            if (submission.holder is None) != (before.holder is None):
                raise BadValue(
                    f"cannot use this key: job {before.id} has it, and is of another kind",
                    "use a new key for each submission",
                )
            return before
        job = queue(tx, submission, seen, policy, clock.now(), state)
        if submission.wait_for == timedelta(0) and job.state is State.QUEUED:
            _refuse_to_wait(job, tx, seen, policy, state)
    return job


def queue(
    tx: Transaction,
    submission: Submission,
    seen: Observation,
    policy: Policy,
    at: datetime,
    state: QueueState,
) -> Job:
    """Check a submission, queue its job within a transaction, and return it.

    Raises what `submit` raises, but not NoRoomNow.
    """
    limits = policy.limits(submission.owner)
    if submission.only_lease:
        refuse_second_lease(tx, submission, "hold a lease for")
    refuse_one_more(policy, submission, tx.user_count(submission.owner.uid))
    empty = state.empty(seen, policy, at)
    if submission.named:
        claim = replace(submission.claim, named=uuids_of(submission.named, seen.readings))
        submission = replace(submission, claim=claim)
    submission = with_time_limit(sized(submission, tx, empty, policy), limits)
    refuse_what_can_never_start(submission.claim, empty, policy, limits, submission.owner.user)
    refuse_beyond_host(submission.claim, seen.host, policy.host)
    after, failure = dependencies.resolve(tx, submission.after)
    submission = replace(submission, queue=replace(submission.queue, after=after))
    job = _add(tx, submission, at, failure)
    refuse_too_much(policy.quotas, submission, tx.user_count(submission.owner.uid))
    if refuses_more(limits):
        live = tx.live()
        most = largest(empty, 1)
        refuse_over_limit(_elements(job, live), live, limits, state.recent_use, most, at)
    return job


def _elements(job: Job, live: Iterable[Job]) -> Sequence[Job]:
    """Return all elements of the array of a job, or the job alone."""
    array = job.queue.array
    if array is None:
        return [job]
    others = ((each, each.queue.array) for each in live)
    return [each for each, of in others if of is not None and of.job == array.job] or [job]


def _add(tx: Transaction, submission: Submission, at: datetime, failure: str | None) -> Job:
    """Store a job, or all elements of an array; return it, or the first of them.

    They end at once if `failure` says why a dependency can no longer be met.
    """
    indices = submission.indices
    jobs = [tx.add(submission, at)] if indices is None else tx.add_array(submission, indices, at)
    if failure is not None:
        jobs = [dependencies.failed(job, failure, at) for job in jobs]
        tx.save_all(jobs, Event(at, Trigger.CANCEL, failure))
    return jobs[0]


_WAIT = "leave out --no-wait to wait in the queue, or limit the wait with --wait 30m"


def _refuse_to_wait(
    job: Job,
    tx: Transaction,
    seen: Observation,
    policy: Policy,
    state: QueueState,
) -> None:
    if (pause := tx.pause()) is not None:
        raise NoRoomNow(f"cannot lease {job.claim} now: {pause}", _WAIT)
    decided = plan(state.snapshot(tx.live(), seen, policy, tx.drained(), job.submitted_at))
    if any(granted == job.id for granted, _ in decided.grants):
        return
    if (block := decided.blocked.get(job.id)) is not None:
        labels = {each.id: each.label for each in tx.live()}
        raise NoRoomNow(
            f"cannot start the job now: {block.sentence(labels)}", "leave out --no-wait"
        )
    waits = why_waiting(decided, job)
    parts = [f"GPU {each.label}: {each.why}" for each in waits.refusal.obstacles]
    parts += [] if waits.refusal.host is None else [waits.refusal.host.why]
    where = "; ".join(parts)
    where = where if waits.over_limit is None else str(waits.over_limit)
    raise NoRoomNow(f"cannot lease {job.claim} now" + (f": {where}" if where else ""), _WAIT)
