"""Converts jobs to rows and rows to jobs; the store returns domain objects only."""

import json
import zlib
from collections.abc import Iterable
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from fractions import Fraction

from gpulease.domain.gpu import GpuUuid, JobId
from gpulease.domain.job import (
    CommandFingerprint,
    EarlySignal,
    Exit,
    Holder,
    HostUse,
    Invocation,
    Job,
    JobActivity,
    JobUsage,
    Outcome,
    Owner,
    Process,
    SlurmJob,
    TerminalSettings,
)
from gpulease.domain.lease import Claim, Lease, State
from gpulease.domain.notifications import Message, due_at
from gpulease.domain.queue_options import (
    FIRST_RETRY_DELAY,
    ArrayElement,
    Condition,
    Dependency,
    Priority,
    QueueOptions,
)
from gpulease.store.tables import EPOCH, HolderRow, JobRow, LeaseRow
from gpulease.units import Share

_MICROSECOND = timedelta(microseconds=1)


def invocation_key(job: Job) -> JobId:
    """Return the id under which the invocation of `job` is stored: its own, or its array's."""
    return job.id if job.queue.array is None else job.queue.array.job


def job_values(job: Job) -> dict[str, object]:
    """Return the columns of `job` except its id, as SQLite stores them."""
    claim, exit_ = job.claim, job.exit or Exit()
    memory, share = _size_and_share(claim.memory)
    memory_bound, share_bound = _size_and_share(claim.memory_bound)
    return {
        "uid": job.owner.uid,
        "gid": job.owner.gid,
        "user": job.owner.user,
        "name": job.name,
        "command": job.command,
        "memory": memory,
        "share": share,
        "memory_bound": memory_bound,
        "share_bound": share_bound,
        "gpus": claim.gpus,
        "exclusive": claim.exclusive,
        "time_limit_us": _microseconds(claim.time_limit),
        "gpu_uuids": ",".join(claim.named) or None,
        "gpu_model": claim.model,
        "min_vram": claim.min_vram,
        "same_model": claim.same_model,
        "ram": claim.ram,
        "cpus": claim.cpus,
        "linked": claim.linked,
        "state": job.state.value,
        "submitted_at": instant(job.submitted_at),
        "gives_up_at": instant(job.gives_up_at),
        "granted_at": instant(job.granted_at),
        "started_at": instant(job.started_at),
        "ended_at": instant(job.ended_at),
        "pid": job.pid,
        "shim_pid": job.shim_pid,
        "outcome": job.outcome.value if job.outcome else None,
        "detail": job.detail,
        "exit_code": exit_.code,
        "exit_signal": exit_.signal,
        "main_exited_at": instant(job.main_exited_at),
        "terminal": job.terminal,
        "grace_us": _microseconds(job.grace),
        "kept_until_at": instant(job.kept_until_at),
        **_account_values(job.usage),
        **_queue_values(job.queue),
        "predicted_run_us": _microseconds(job.predicted_run_for),
        "predicted_start_at": instant(job.predicted_start_at),
        "predicted_from_at": instant(job.predicted_from_at),
        "predicted_until_at": instant(job.predicted_until_at),
        "utilization": job.utilization,
        "first_use_at": instant(job.activity.first_use_at),
        "steps": job.activity.steps,
        "steps_per_second": job.activity.steps_per_second,
        "ram_peak": job.host_use.ram_peak,
        "cpu_us": _microseconds(job.host_use.cpu_for),
        "slurm_job": job.slurm and job.slurm.id,
        "slurm_node": job.slurm and job.slurm.node,
        "slurm_restarts": None if job.slurm is None else job.slurm.restarts,
        "notify": ",".join(job.notify) or None,
    }


def _size_and_share(size: int | Share | None) -> tuple[int | None, str | None]:
    return (None, str(size.percent)) if isinstance(size, Share) else (size, None)


def _size_or_share(size: int | None, share: str | None) -> int | Share | None:
    return size if share is None else Share(Fraction(share))


def _microseconds(span: timedelta | None) -> int | None:
    return None if span is None else span // _MICROSECOND


def instant(at: datetime | None) -> int | None:
    """Return an instant as SQLite stores it; see `tables.Instant`."""
    return None if at is None else (at - EPOCH) // _MICROSECOND


def _queue_values(options: QueueOptions) -> dict[str, object]:
    array = options.array
    return {
        "priority": options.priority.value,
        "queue_nice": options.nice,
        "held": options.held,
        "begin_at": instant(options.begin_at),
        "after": ",".join(map(str, options.after)) or None,
        "requeue": options.requeue,
        "preemptible": options.preemptible,
        "array": array and array.job,
        "array_index": None if array is None else array.index,
        "array_most": array and array.most_running,
        "aging_since_at": instant(options.aging_since_at),
        "moved_before": options.moved_before,
        "moved_by_admin": options.moved_by_admin,
        "requeued": options.requeued,
        "retries": options.retries,
        "retry_on": ",".join(map(str, options.retry_on)) or None,
        "retry_delay_us": _microseconds(options.retry_delay) if options.retries else None,
        "retried": options.retried,
    }


def _queue_of(row: JobRow) -> QueueOptions:
    array = None
    if row.array is not None and row.array_index is not None:
        array = ArrayElement(JobId(row.array), row.array_index, row.array_most)
    return QueueOptions(
        priority=Priority(row.priority),
        nice=row.queue_nice,
        held=row.held,
        begin_at=row.begin_at,
        after=tuple(_dependency_of(each) for each in (row.after or "").split(",") if each),
        requeue=row.requeue,
        preemptible=row.preemptible,
        array=array,
        aging_since_at=row.aging_since_at,
        moved_before=None if row.moved_before is None else JobId(row.moved_before),
        moved_by_admin=row.moved_by_admin,
        requeued=row.requeued,
        retries=row.retries,
        retry_on=tuple(int(each) for each in (row.retry_on or "").split(",") if each),
        retry_delay=_retry_delay(row),
        retried=row.retried,
    )


def _retry_delay(row: JobRow) -> timedelta:
    us = row.retry_delay_us
    return FIRST_RETRY_DELAY if us is None else timedelta(microseconds=us)


def _dependency_of(text: str) -> Dependency:
    job, _, condition = text.partition(":")
    number = JobId(int(job.removesuffix("*")))
    return Dependency(number, Condition(condition), whole_array=job.endswith("*"))


def _account_values(account: JobUsage) -> dict[str, object]:
    shape = account.fingerprint
    return {
        "alike": shape and shape.similar_key,
        "same": shape and shape.exact_key,
        "sized": account.size_reason,
        "retry": None if account.retry_factor is None else str(account.retry_factor),
        "attempt": account.attempt,
        "retry_of": account.retry_of,
        "retried_as": account.retried_as,
        "out_of_memory": account.out_of_memory,
    }


def _account_of(row: JobRow) -> JobUsage:
    known = row.alike is not None and row.same is not None
    return JobUsage(
        fingerprint=CommandFingerprint(row.alike or "", row.same or "") if known else None,
        size_reason=row.sized,
        retry_factor=None if row.retry is None else Fraction(row.retry),
        attempt=row.attempt,
        retry_of=None if row.retry_of is None else JobId(row.retry_of),
        retried_as=None if row.retried_as is None else JobId(row.retried_as),
        out_of_memory=row.out_of_memory,
    )


def holder_values(job: JobId, holder: Holder) -> dict[str, object]:
    """Return the columns of the holder of `job`."""
    process, asker = holder.process, holder.waiting_client
    return {
        "job": job,
        "boot": next((each.boot for each in (process, asker) if each is not None), None),
        "pid": process and process.pid,
        "started": process and process.started,
        "asker_pid": asker and asker.pid,
        "asker_started": asker and asker.started,
        "adopted": holder.adopted,
    }


def _holder_of(row: HolderRow) -> Holder:
    return Holder(
        _process(row.pid, row.started, row.boot),
        _process(row.asker_pid, row.asker_started, row.boot),
        row.adopted,
    )


def _process(pid: int | None, started: int | None, boot: str | None) -> Process | None:
    if pid is None or started is None or boot is None:
        return None
    return Process(pid, started, boot)


def job_of(row: JobRow, leases: Iterable[LeaseRow], holder: HolderRow | None) -> Job:
    """Return the job that a row, its leases and its holder describe."""
    known_exit = row.exit_code is not None or row.exit_signal is not None
    return Job(
        id=JobId(row.id),
        owner=Owner(row.uid, row.gid, row.user),
        name=row.name,
        command=row.command,
        claim=_claim_of(row),
        submitted_at=row.submitted_at,
        gives_up_at=row.gives_up_at,
        state=State(row.state),
        leases=tuple(_lease_of(each) for each in leases),
        granted_at=row.granted_at,
        started_at=row.started_at,
        ended_at=row.ended_at,
        pid=row.pid,
        shim_pid=row.shim_pid,
        outcome=Outcome(row.outcome) if row.outcome else None,
        detail=row.detail,
        exit=Exit(row.exit_code, row.exit_signal) if known_exit else None,
        main_exited_at=row.main_exited_at,
        terminal=row.terminal,
        grace=None if row.grace_us is None else row.grace_us * _MICROSECOND,
        holder=None if holder is None else _holder_of(holder),
        kept_until_at=row.kept_until_at,
        usage=_account_of(row),
        queue=_queue_of(row),
        predicted_run_for=(
            None if row.predicted_run_us is None else row.predicted_run_us * _MICROSECOND
        ),
        predicted_start_at=row.predicted_start_at,
        predicted_from_at=row.predicted_from_at,
        predicted_until_at=row.predicted_until_at,
        utilization=row.utilization,
        activity=JobActivity(row.first_use_at, row.steps, row.steps_per_second),
        host_use=HostUse(row.ram_peak, None if row.cpu_us is None else row.cpu_us * _MICROSECOND),
        slurm=None
        if row.slurm_job is None
        else SlurmJob(row.slurm_job, row.slurm_node or "", row.slurm_restarts or 0),
        notify=tuple(row.notify.split(",")) if row.notify else (),
    )


def message_values(message: Message, at: datetime) -> dict[str, object]:
    """Return the columns of a new notification."""
    due = due_at(message, at)
    return {
        "job": message.job,
        "uid": message.uid,
        "event": message.event.value,
        "title": message.title,
        "body": message.body,
        "at": instant(at),
        # Due at once, also after the clock was set back.
        "next_at": 0 if due is None else instant(due),
    }


def lease_values(lease: Lease) -> dict[str, object]:
    """Return the columns of `lease` that change over time."""
    rungs = lease.enforced_by
    return {
        # It moves where the clock is set.
        "granted_at": instant(lease.granted_at),
        # Never before the grant, whatever the clock has done meanwhile.
        "released_at": lease.released_at and instant(max(lease.released_at, lease.granted_at)),
        "enforced_by": None if rungs is None else ",".join(rungs),
        "driver_limit": lease.driver_limit,
        "used": lease.used,
    }


def _lease_of(row: LeaseRow) -> Lease:
    rungs = row.enforced_by
    return Lease(
        GpuUuid(row.gpu),
        row.memory,
        row.granted_at,
        row.released_at,
        row.peak,
        over_for=None if row.over_for_us is None else row.over_for_us * _MICROSECOND,
        enforced_by=None if rungs is None else tuple(filter(None, rungs.split(","))),
        driver_limit=row.driver_limit,
        used=row.used,
        memory_bound=row.memory_bound,
    )


def _claim_of(row: JobRow) -> Claim:
    limit = row.time_limit_us
    return Claim(
        _size_or_share(row.memory, row.share) or 0,
        row.gpus,
        row.exclusive,
        None if limit is None else limit * _MICROSECOND,
        tuple(GpuUuid(uuid) for uuid in (row.gpu_uuids or "").split(",") if uuid),
        row.gpu_model,
        row.min_vram,
        row.same_model,
        _size_or_share(row.memory_bound, row.share_bound),
        row.ram,
        row.cpus,
        row.linked,
    )


def pack(invocation: Invocation) -> bytes:
    """Return an invocation as compressed JSON; PEP 383 surrogates survive as escapes."""
    early = invocation.early_signal
    content = {
        "argv": invocation.argv,
        "cwd": invocation.cwd,
        "environment": dict(invocation.environment),
        "umask": invocation.umask,
        "soft_limits": dict(invocation.soft_limits),
        "nice": invocation.nice,
        "attached": invocation.attached,
        "options": dict(invocation.options),
        "groups": invocation.groups,
        "terminal": invocation.terminal and asdict(invocation.terminal),
        "early_signal": early
        and {"signal": early.signal, "before_us": early.before // _MICROSECOND},
        "ends_with_client": invocation.ends_with_client,
        "grace_us": _microseconds(invocation.grace),
        "grid": dict(invocation.grid),
    }
    return zlib.compress(json.dumps(content).encode("ascii"), level=1)


PAST = b"-"
"""Before the packed invocation of a job that has ended, which no row of a live one begins with."""


def pack_past(invocation: Invocation) -> bytes:
    """Return what is kept of an invocation after the end: all but the environment."""
    return PAST + pack(replace(invocation, environment={}))


def unpack(packed: bytes) -> Invocation:
    """Return the invocation that was packed, without environment after the end of its job."""
    content = json.loads(zlib.decompress(packed.removeprefix(PAST)))
    # What came with later versions is not in the rows of earlier ones.
    groups, terminal = content.pop("groups", None), content.pop("terminal", None)
    early, grace = content.pop("early_signal", None), content.pop("grace_us", None)
    grid = content.pop("grid", {})
    if terminal is not None and terminal["attributes"]:
        terminal["attributes"] = tuple(terminal["attributes"])
    return Invocation(
        **{**content, "argv": tuple(content["argv"])},
        groups=None if groups is None else tuple(groups),
        terminal=terminal and TerminalSettings(**terminal),
        early_signal=early and EarlySignal(early["signal"], early["before_us"] * _MICROSECOND),
        grace=None if grace is None else grace * _MICROSECOND,
        grid={name: tuple(values) for name, values in grid.items()},
    )
