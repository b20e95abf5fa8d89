"""`gpuleased recover`: rebuilds a damaged database from itself, its backups and the running jobs.

Deletes nothing: the damaged file is kept next to the new one. Safe to repeat: with an intact
database it only adds running jobs that are missing in it.

Reads the leases of running jobs from their directories and the environments of their processes. A
user controls the environment of a process, but only of processes of that user, and so of jobs.
"""

import json
import os
import pwd
import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from gpulease.config import DATABASE_NAME, Settings
from gpulease.domain.gpu import GpuReading, GpuUuid, JobId
from gpulease.domain.job import Job, Outcome, Owner, asked_to_end
from gpulease.domain.lease import Claim, Lease, State, Trigger
from gpulease.errors import NoSuchJob, StateUnusable, state_fault
from gpulease.host import shim_control
from gpulease.host.proc_reader import command_of
from gpulease.host.processes import MARKER, environment_of
from gpulease.host.state_dir import UNMANAGED, StateDirectory
from gpulease.service.ports import Event
from gpulease.shim import process_tree
from gpulease.shim.record import Record, is_alive, read_record
from gpulease.store.database_file import all_copies
from gpulease.store.recovery import SalvageCounts, is_sound, rebuild
from gpulease.store.salvage import Salvage, salvage
from gpulease.store.store import SqlStore
from gpulease.worker.environment import HOOK_VARIABLE


@dataclass(frozen=True, slots=True)
class SurvivingJob:
    """A launched job, as far as it is known without the database."""

    job: JobId
    record: Record
    alive: bool
    found: Job | None
    """The job, from its processes; None if they do not show enough."""
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
    shim = shim_control.shim_pid(directory) if alive else None
    if shim is None and alive and record.started is not None:
        shim = record.started.shim_pid
    if shim is None:
        return SurvivingJob(number, record, alive, None)
    for pid in (each.pid for each in process_tree.descendants(shim)):
        environment = _environment(pid)
        installation, _, job = environment.get(MARKER, "").partition("/")
        if job.partition("/")[0] != str(number) or not installation:
            continue
        gpus = _gpus(environment)
        found = _job(number, record, shim, pid, gpus)
        readings = tuple(reading for reading, _ in gpus)
        return SurvivingJob(number, record, alive, found, readings, installation)
    return SurvivingJob(number, record, alive, None)


def _environment(pid: int) -> dict[str, str]:
    pairs = (os.fsdecode(part).partition("=") for part in environment_of(pid).split(b"\0"))
    return {name: value for name, _, value in pairs}


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
        owner=Owner(uid, gid, _name(uid)),
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


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


_SCRATCH = "recovering"
_OVER = {Trigger.CANCEL, Trigger.EXPIRE, Trigger.WORKER_EXITED, Trigger.LAUNCH_FAILED}
"""The last events of jobs that have ended."""
_NAMES = {
    "gpu_memory": "samples of GPU memory",
    "job_memory": "samples of the memory of jobs",
    "gpu_events": "health events",
    "invocations": "commands of queued jobs",
    "submissions": "keys of submissions",
}
_EVENT = "recovered"


@dataclass(slots=True)
class RecoveryReport:
    """The result, in lines for the admin."""

    lines: list[str] = field(default_factory=list)

    def say(self, line: str) -> None:
        """Add a line."""
        self.lines.append(line)


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
    path, report = state.path / DATABASE_NAME, RecoveryReport()
    try:
        if path.exists() and is_sound(path):
            report.say(f"{path} is intact")
            _add_running(path, state, report, restored=False)
        else:
            _restore(path, state, report)
    except OSError as error:
        raise state_fault(f"cannot recover {path}", error) from error
    finally:
        state.close()
    return report.lines


def _restore(path: Path, state: StateDirectory, report: RecoveryReport) -> None:
    with _scratch(state.path / _SCRATCH) as scratch:
        model = next((it for it in all_copies(path) if is_sound_copy(it, scratch)), None)
        damaged = _read(path, scratch / "damaged", model)
        read = [] if model is None else [_read(model, scratch / "copy", None)]
        _refuse_other_databases(path, damaged, read)
        aside = _keep_aside(path)
        target = scratch / DATABASE_NAME
        counts = rebuild(target, damaged, read, max(state.numbers(), default=0))
        _describe(report, path, aside, model, counts)
        _add_running(target, state, report, restored=True)
        if not is_sound(target):
            raise AssertionError("the new database is not sound")
        _put_in_place(target, path)
    report.say(f"{path} is restored; start gpuleased again")


@contextmanager
def _scratch(directory: Path) -> Iterator[Path]:
    """Return an empty working directory; remove what an earlier attempt left there."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(mode=0o700)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def is_sound_copy(copy: Path, scratch: Path) -> bool:
    """Return whether a backup is intact; checks a copy, since SQLite creates files next to it."""
    looked_at = scratch / "look.db"
    shutil.copyfile(copy, looked_at)
    try:
        return is_sound(looked_at)
    finally:
        looked_at.unlink()


def _read(path: Path, scratch: Path, model: Path | None) -> Salvage:
    scratch.mkdir()
    return salvage(path, scratch, model) if path.exists() else Salvage()


def _refuse_other_databases(path: Path, damaged: Salvage, copies: Sequence[Salvage]) -> None:
    if damaged.tables and "jobs" not in damaged.tables and not any(it.tables for it in copies):
        raise StateUnusable(
            f"cannot recover {path}: it is not a gpulease database",
            "use a separate state directory for gpuleased, with --state",
        )


def _keep_aside(path: Path) -> Path | None:
    """Copy the damaged file and its write-ahead log next to it; None if neither exists."""
    log = path.with_name(f"{path.name}-wal")
    if not path.exists() and not log.exists():
        return None
    number = 1
    while any(path.parent.glob(f"{path.name}.damaged-{number}*")):
        number += 1
    aside = path.with_name(f"{path.name}.damaged-{number}")
    # The log first: the name of the main file marks a complete copy.
    for end in ("-wal", ""):
        source = path.with_name(path.name + end)
        if source.exists():
            to = aside.with_name(aside.name + end)
            shutil.copyfile(source, to)
            to.chmod(0o600)
            _sync(to)
    return aside


def _put_in_place(target: Path, path: Path) -> None:
    _sync(target)
    # SQLite would apply the old write-ahead log to the new file.
    for end in ("-wal", "-shm"):
        path.with_name(path.name + end).unlink(missing_ok=True)
    target.chmod(0o600)
    target.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _describe(
    report: RecoveryReport, path: Path, aside: Path | None, copy: Path | None, counts: SalvageCounts
) -> None:
    if aside is not None and aside.exists():
        report.say(f"the damaged file is kept as {aside}")
        report.say(f"restored from it: {_counted(counts.saved)}")
    else:
        report.say(f"{path} does not exist")
        if aside is not None:
            report.say(f"its write-ahead log, which is useless without it, is kept as {aside}-wal")
    if counts.copied and copy is not None:
        of = datetime.fromtimestamp(copy.stat().st_mtime, UTC).isoformat(" ", "seconds")
        report.say(f"restored from the backup {copy.name} of {of}: {_counted(counts.copied)}")
        report.say("later changes to what came from the backup are lost")
    if counts.dropped:
        report.say(f"unusable: {_counted(counts.dropped)}")
    if counts.broken:
        names = ", ".join(_NAMES.get(name, name) for name in counts.broken)
        report.say(f"may be incomplete: {names}")


def _counted(numbers: dict[str, int]) -> str:
    parts = [f"{number} {_NAMES.get(name, name)}" for name, number in numbers.items()]
    return ", ".join(parts) or "nothing"


def _add_running(
    path: Path, state: StateDirectory, report: RecoveryReport, *, restored: bool
) -> None:
    """Add what the directories and processes of jobs show."""
    seen = list(surviving_jobs(state.jobs))
    store = SqlStore(path)
    try:
        store.skip_ids_up_to(max(state.numbers(), default=0))
        store.installation(next((it.installation for it in seen if it.installation), None))
        for job in seen:
            _add(store, job, state.job(job.job), report)
        if restored:
            launched = {job.job for job in seen}
            for each in store.live():
                _end_if_lost(store, each, each.id in launched, report)
        states = [job.state for job in store.live()]
        waiting = states.count(State.QUEUED)
        report.say(f"{len(states) - waiting} jobs hold memory, {waiting} are queued")
    finally:
        store.close()


def _add(store: SqlStore, survivor: SurvivingJob, directory: Path, report: RecoveryReport) -> None:
    """Add a surviving job to the database, or what is missing there about it."""
    known, found = store.job(survivor.job), survivor.found
    at = datetime.now(UTC)
    if known is None:
        if found is not None:
            with store.write() as tx:
                tx.add_gpus(survivor.gpus, at)
                tx.restore(
                    found, Event(at, _EVENT, "from its processes; it was not in the database")
                )
            report.say(f"added job {found.id} of {found.owner.user}, which is running")
        elif survivor.alive:
            # So that the daemon starts.
            (directory / UNMANAGED).touch(mode=0o600)
            report.say(
                f"job {survivor.job} is running, but its lease is unknown: its memory counts as "
                "unmanaged"
            )
        return
    changed = _as_launched(known, survivor, at)
    if changed is not None:
        with store.write() as tx:
            tx.add_gpus(survivor.gpus, at)
            tx.save(changed, Event(at, _EVENT, "launched, according to its directory"))
        report.say(f"job {known.id} was launched, according to its directory")


def _as_launched(known: Job, survivor: SurvivingJob, at: datetime) -> Job | None:
    """Return a job of the database as launched; None if it is launched there already."""
    leases = survivor.found.leases if survivor.found is not None else ()
    if known.state is State.QUEUED:
        # The daemon reads the rest from the job's directory when it starts.
        started = survivor.record.started
        granted_at = started.started_at if started is not None else at
        return replace(known, state=State.GRANTED, leases=leases, granted_at=granted_at)
    if known.holds_memory and not known.leases and leases:
        return replace(known, leases=leases)
    return None


def _end_if_lost(store: SqlStore, job: Job, launched: bool, report: RecoveryReport) -> None:
    """End a queued or granted job that was never launched and cannot be launched any more."""
    if launched or job.state not in (State.QUEUED, State.GRANTED) or not job.has_shim:
        return
    if any(event.kind in _OVER for event in store.events(job.id)):
        why = "it ended before the database was damaged, and its result is lost"
    elif _has_no_command(store, job):
        why = "its command was lost with the damaged database; submit it again"
    else:
        return
    at = datetime.now(UTC)
    ended = asked_to_end(
        replace(job, state=State.QUEUED, leases=()), Trigger.CANCEL, Outcome.LOST, why, at
    )
    assert ended is not None, "a queued job can always be ended"
    with store.write() as tx:
        tx.save(ended, Event(at, _EVENT, why))
    report.say(f"job {job.id} of {job.owner.user} is lost: {why}")


def _has_no_command(store: SqlStore, job: Job) -> bool:
    try:
        store.invocation(job.id)
    except NoSuchJob:
        return True
    return False
