"""`gpuleased recover`: replaces a damaged database by its newest sound copy and the jobs' records.

Deletes nothing: the damaged file is kept next to the new one. Safe to repeat: with an intact
database it only adds running jobs that are missing in it.

Reads the leases of running jobs from their directories and the environments of their processes. A
user controls the environment of a process, but only of processes of that user, and so of jobs.
"""

import json
import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from gpulease.config import DATABASE_NAME, Settings
from gpulease.domain.gpu import GpuReading, GpuUuid, JobId
from gpulease.domain.job import Job, Owner, worker_gone, worker_started
from gpulease.domain.lease import Claim, Lease, State, Trigger
from gpulease.errors import RecordUnwritable, StateUnusable, StateUnwritable, state_fault
from gpulease.host import shim_control
from gpulease.host.job_runner import worker_exited
from gpulease.host.proc_reader import command_of
from gpulease.host.processes import MARKER, environment_of
from gpulease.host.shim_control import session_of
from gpulease.host.state_dir import UNMANAGED, StateDirectory
from gpulease.peer_credentials import user_name
from gpulease.service.job_list import JobQuery
from gpulease.service.ports import Event
from gpulease.service.transactions import change_jobs
from gpulease.shim import process_tree
from gpulease.shim.record import Record, is_alive, read_record
from gpulease.shim.spawner import SOCKET
from gpulease.store.database_file import (
    all_copies,
    is_sound,
    last_possible_id,
    refuse_other_database,
    sync,
)
from gpulease.store.schema import known_revisions
from gpulease.store.store import SqlStore
from gpulease.worker.environment import HOOK_VARIABLE


@dataclass(frozen=True, slots=True)
class SurvivingJob:
    """A launched job, as far as it is known without the database."""

    job: JobId
    record: Record
    alive: bool
    found: Job | None
    """The job, from its processes, or from its directory if it has none; None if these do not
    show enough."""
    gpus: tuple[GpuReading, ...] = ()
    installation: str | None = None


def surviving_jobs(jobs: Path) -> Iterator[SurvivingJob]:
    """Yield the jobs that have a directory with a record, by id."""
    numbers = sorted(int(each.name) for each in jobs.iterdir() if each.name.isdecimal())
    for number in numbers:
        directory = jobs / str(number)
        alive = is_alive(directory)
        record = read_record(directory)
        if record is not None:
            yield _surviving_job(JobId(number), directory, record, alive and record.exited is None)


def _surviving_job(number: JobId, directory: Path, record: Record, alive: bool) -> SurvivingJob:
    found_shim = shim_control.living_shim(directory) if alive else None
    shim = None if found_shim is None else found_shim.pid
    if shim is None:
        found = None if alive else _ended(number, directory, record)
        return SurvivingJob(number, record, alive, found)
    for pid in (each.pid for each in process_tree.descendants(shim)):
        pairs = (os.fsdecode(part).partition("=") for part in environment_of(pid).split(b"\0"))
        environment = {name: value for name, _, value in pairs}
        installation, _, job = environment.get(MARKER, "").partition("/")
        if job.partition("/")[0] != str(number) or not installation:
            continue
        gpus = _gpus(environment)
        found = _job(number, record, shim, pid, gpus)
        readings = tuple(reading for reading, _ in gpus)
        return SurvivingJob(number, record, alive, found, readings, installation)
    return SurvivingJob(number, record, alive, None)


def _gpus(environment: dict[str, str]) -> list[tuple[GpuReading, int]]:
    """Return the leased GPUs, and the bytes leased on each."""
    try:
        gpus: list[dict[str, Any]] = json.loads(environment[HOOK_VARIABLE])["gpus"]
        return [
            (
                GpuReading(GpuUuid(str(each["uuid"])), int(each["index"]), str(each["name"])),
                int(each["memory"]),
            )
            for each in gpus
        ]
    except (KeyError, ValueError, TypeError):
        return []


def _job(
    number: JobId, record: Record, shim: int, pid: int, gpus: list[tuple[GpuReading, int]]
) -> Job | None:
    if record.started is None or not gpus:
        return None
    try:
        # The uid of the shim is that of the owner. A process of the job may be a setuid program.
        owner = psutil.Process(shim)
        uid, gid = owner.uids().real, owner.gids().real
        command = command_of(pid) or ()
    except psutil.Error:
        return None
    at = record.started.started_at
    return Job(
        id=number,
        owner=Owner(uid, gid, user_name(uid)),
        name=Path(command[0]).name if command else "unknown",
        command=shlex.join(command).encode(errors="replace").decode() or "unknown",
        claim=Claim(max(memory for _, memory in gpus), len(gpus)),
        submitted_at=at,
        state=State.ACTIVE,
        leases=tuple(Lease(reading.uuid, memory, at) for reading, memory in gpus),
        granted_at=at,
        started_at=at,
        pid=record.started.pid,
        shim_pid=record.started.shim_pid,
    )


def _ended(number: JobId, directory: Path, record: Record) -> Job | None:
    """Return a job that has ended, as far as its directory shows it."""
    known = record.exited.ended_at if record.exited is not None else None
    at = record.started.started_at if record.started is not None else known
    try:
        owner = (directory / SOCKET).lstat()
    except OSError:
        return None
    if at is None:
        return None
    return Job(
        id=number,
        owner=Owner(owner.st_uid, owner.st_gid, user_name(owner.st_uid)),
        name="unknown",
        command="unknown",
        # Unknown too, but a job asks for something.
        claim=Claim(1),
        submitted_at=at,
        state=State.GRANTED,
        granted_at=at,
    )


_SCRATCH = "recovering"
_EVENT = "recovered"


def recover(settings: Settings) -> list[str]:
    """Restore the database so that a daemon can start, and return the result, line by line.

    Raises:
        StateUnusable: the directory does not exist or is in use, or the file is another database.
        StateUnwritable: it cannot be restored now, for example without space for a second file.
    """
    if not settings.state.is_dir():
        raise StateUnusable(
            f"cannot recover {settings.state}: no such directory",
            "name the state directory of the daemon with --state",
        )
    state = StateDirectory(settings.state)
    path, report = state.path / DATABASE_NAME, list[str]()
    try:
        if path.exists() and is_sound(path) and _can_be_opened(path):
            report.append(f"{path} is intact")
            with closing(SqlStore(path)) as store:
                _add_records(store, state, report, is_old=False)
                report.append(_summary(store))
        else:
            _restore(path, state, report)
    except OSError as error:
        raise state_fault(f"cannot recover {path}", error) from error
    except RecordUnwritable as error:
        raise StateUnwritable(error.message, error.hint) from error
    finally:
        state.close()
    return report


def _restore(path: Path, state: StateDirectory, report: list[str]) -> None:
    scratch = state.path / _SCRATCH
    # An earlier attempt may have left it.
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(mode=0o700)
    try:
        target = scratch / DATABASE_NAME
        copy = _newest_copy(path, target, report)
        _describe(copy, report)
        with closing(SqlStore(target)) as store:
            store.skip_ids_up_to(last_possible_id(path, max(state.numbers(), default=0)))
            _add_records(store, state, report, is_old=True)
            report.append(_summary(store))
        assert is_sound(target)
        _keep_aside(path, report)
        _put_in_place(target, path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    report.append(f"{path} is restored; start gpuleased again")


def _can_be_opened(path: Path) -> bool:
    """Tell whether what a start reads has the right type, which only we know."""
    try:
        with closing(SqlStore(path)):
            return True
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return False


def _newest_copy(path: Path, target: Path, report: list[str]) -> Path | None:
    """Copy the newest sound backup to `target`, and return which it is; None if there is none."""
    known = known_revisions()
    for copy in all_copies(path):
        shutil.copyfile(copy, target)
        # Checked here, since SQLite creates files next to the one that it reads.
        if is_sound(target, known) and _can_be_opened(target):
            return copy
        report.append(f"{copy.name} is not used: it is damaged, or of a newer gpulease")
        target.unlink()
    refuse_other_database(path)
    return None


def _describe(copy: Path | None, report: list[str]) -> None:
    if copy is None:
        report.append("there is no sound copy: only jobs that have a directory are known")
        report.append(
            "lost: jobs that waited, holds, the history, reservations of GPUs, drained GPUs and "
            "a pause of the queue"
        )
        return
    of = datetime.fromtimestamp(copy.stat().st_mtime, UTC).isoformat(" ", "seconds")
    report.append(f"restored from {copy.name}, which was made at {of}, and from the jobs' records")
    report.append(
        "lost: jobs that were submitted after that and had not started, holds, and other changes "
        "after that; a job that was cancelled while it waited waits again: see gpulease list"
    )


def _keep_aside(path: Path, report: list[str]) -> None:
    """Give the damaged file and its write-ahead log a second name, which takes no space."""
    number = 1
    while any(path.parent.glob(f"{path.name}.damaged-{number}*")):
        number += 1
    for end, what in (("-wal", "its write-ahead log"), ("", "the damaged file")):
        source = path.with_name(path.name + end)
        if source.exists():
            aside = path.with_name(f"{path.name}.damaged-{number}{end}")
            os.link(source, aside)
            aside.chmod(0o600)
            report.append(f"{what} is kept as {aside}")


def _put_in_place(target: Path, path: Path) -> None:
    sync(target)
    # SQLite would apply the old write-ahead log to the new file.
    for end in ("-wal", "-shm"):
        path.with_name(path.name + end).unlink(missing_ok=True)
    target.chmod(0o600)
    target.replace(path)
    sync(path.parent)


def _summary(store: SqlStore) -> str:
    states = [job.state for job in store.live()]
    waiting = states.count(State.QUEUED)
    return f"{len(states) - waiting} jobs hold memory, {waiting} are queued"


def _add_records(
    store: SqlStore, state: StateDirectory, report: list[str], *, is_old: bool
) -> None:
    """Add what the directories and processes of jobs show and the database lacks.

    To an old copy, also the ends of jobs, and jobs that came after it and have ended. From the
    present database, those were removed on purpose, and the daemon adds the ends when it starts.
    """
    seen = list(surviving_jobs(state.jobs))
    store.skip_ids_up_to(max(state.numbers(), default=0))
    store.installation(next((it.installation for it in seen if it.installation), None))
    newest = store.jobs(JobQuery(ended=True, newest=True, limit=1)).jobs
    last = newest[0].id if newest else JobId(0)
    ended = {job for job, *_ in store.ended(each.job for each in seen)}
    number = 0
    with store.batch():
        for each in seen:
            if each.job in ended:
                continue
            known = store.job(each.job)
            if known is None and (each.alive or (is_old and each.job > last)):
                known = _add_job(store, each, state.job(each.job), report)
            if known is not None:
                now = _add_news(store, known, each, state.job(each.job), report, is_old=is_old)
                number += now.state is State.ENDED
    if number:
        report.append(f"jobs that have ended since, according to their directories: {number}")


def _add_job(
    store: SqlStore, survivor: SurvivingJob, directory: Path, report: list[str]
) -> Job | None:
    """Add a job that the database lacks; None if too little is known of it."""
    found, at = survivor.found, datetime.now(UTC)
    if found is not None:
        with store.write() as tx:
            tx.add_gpus(survivor.gpus, at)
            why = "from its directory; it was not in the database"
            tx.restore(found, Event(at, _EVENT, why))
        if survivor.alive:
            report.append(f"added job {found.id} of {found.owner.user}, which is running")
    elif survivor.alive:
        # So that the daemon starts.
        (directory / UNMANAGED).touch(mode=0o600)
        report.append(
            f"job {survivor.job} is running, but its lease is unknown: its memory counts as "
            "unmanaged"
        )
    return found


def _add_news(
    store: SqlStore,
    known: Job,
    survivor: SurvivingJob,
    directory: Path,
    report: list[str],
    *,
    is_old: bool,
) -> Job:
    """Change a job of the database to what its directory shows, and return it."""
    at = datetime.now(UTC)
    changed = _as_launched(known, survivor, at)
    if survivor.alive and changed != known:
        report.append(f"job {known.id} was launched, according to its directory")
    if is_old:
        changed = _as_recorded(changed, survivor, directory)
    if changed != known:
        with change_jobs(store) as tx:
            tx.add_gpus(survivor.gpus, at)
            tx.save(changed, Event(at, _EVENT, "from its directory"))
    return changed


def _as_launched(known: Job, survivor: SurvivingJob, at: datetime) -> Job:
    """Return a job of the database as launched."""
    leases = survivor.found.leases if survivor.found is not None else ()
    if known.state is State.QUEUED:
        # The daemon reads the rest from the job's directory when it starts.
        started = survivor.record.started
        granted_at = started.started_at if started is not None else at
        return replace(known, state=State.GRANTED, leases=leases, granted_at=granted_at)
    if known.holds_memory and not known.leases and leases:
        return replace(known, leases=leases)
    return known


def _as_recorded(job: Job, survivor: SurvivingJob, directory: Path) -> Job:
    """Return a job of the copy as its record has it.

    The end is not left to the daemon, which may queue a job again that has ended. The former daemon
    may have done so, and that work would be done twice.
    """
    started, ended = survivor.record.started, survivor.record.exited
    if ended is not None:
        running = (
            worker_started(job, started.pid, started.shim_pid, started.started_at)
            if started is not None
            else None
        )
        job, news = running or job, worker_exited(ended)
        end = worker_gone(job, Trigger.WORKER_EXITED, news.outcome, news.detail, news.exit, news.at)
        return end or job
    limit = job.claim.time_limit
    if not survivor.alive and session_of(directory) is not None:
        # It was killed while the machine ran, and the former daemon may have seen that.
        return replace(job, queue=replace(job.queue, requeue=False))
    if started is not None and limit and started.started_at + limit < datetime.now(UTC):
        # It has been extended. Its shim has the new limit, and would be sent this one.
        return replace(job, claim=replace(job.claim, time_limit=None))
    return job
