"""`gpuleased recover`: a sound record out of a damaged one, its copies, and the jobs that run.

Nothing is deleted: the damaged file is kept beside the new one. May be repeated at will; with a
record that is in order it changes nothing but to take in running jobs that the record lost.

What a running job itself says of its lease: its directory, its processes, their environment.

For the recovery of a lost record alone. What an environment says is its user's word; that it counts
for no other user's job is seen to by whose the process is.
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
from gpulease.domain.job import Job, Outcome, Owner, asked_to_go
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
from gpulease.store.recovery import Salvage, SalvageCounts, is_sound, rebuild, salvage
from gpulease.store.store import SqlStore
from gpulease.worker.environment import HOOK_VARIABLE


@dataclass(frozen=True, slots=True)
class SurvivingJob:
    """A job that was launched, as it can be seen without the record."""

    job: JobId
    record: Record
    alive: bool
    found: Job | None
    """The job as its processes show it; None where they do not."""
    gpus: tuple[GpuReading, ...] = ()
    installation: str | None = None


def surviving_jobs(jobs: Path) -> Iterator[SurvivingJob]:
    """Yield what each job's directory tells, by id."""
    numbers = sorted(int(each.name) for each in jobs.iterdir() if each.name.isdecimal())
    for number in numbers:
        directory = jobs / str(number)
        alive = is_alive(directory)
        record = read_record(directory)
        if record is not None:
            yield _witness(JobId(number), directory, record, alive and record.exited is None)


def _witness(number: JobId, directory: Path, record: Record, alive: bool) -> SurvivingJob:
    shim = shim_control.shim_pid(directory) if alive else None
    if shim is None and alive and record.started is not None:
        shim = record.started.shim_pid
    if shim is None:
        return SurvivingJob(number, record, alive, None)
    for pid in (each.pid for each in process_tree.descendants(shim)):
        environment = _environment(pid)
        installation, _, job = environment.get(MARKER, "").rpartition("/")
        if job != str(number) or not installation:
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
    """Return the GPUs of the lease, and the bytes leased on each."""
    try:
        told: list[dict[str, Any]] = json.loads(environment[HOOK_VARIABLE])["gpus"]
        return [
            (
                GpuReading(GpuUuid(str(each["uuid"])), int(each["index"]), str(each["name"])),
                int(each["memory"]),
            )
            for each in told
        ]
    except (KeyError, ValueError, TypeError):
        return []


def _job(
    number: JobId, record: Record, shim: int, pid: int, gpus: list[tuple[GpuReading, int]]
) -> Job | None:
    if record.started is None or not gpus:
        return None
    try:
        # The shim has become its user; a process of the job may be a setuid program.
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
"""What happened last to a job that has ended."""
_NAMES = {"gpu_memory": "samples of GPU memory", "invocations": "commands of waiting jobs"}
_EVENT = "recovered"


@dataclass(slots=True)
class RecoveryReport:
    """What came of it, in lines for the admin."""

    lines: list[str] = field(default_factory=list)

    def say(self, line: str) -> None:
        """Add a line."""
        self.lines.append(line)


def recover(settings: Settings) -> list[str]:
    """Leave a record that a daemon can start with, and return what was done, line by line.

    Raises:
        StateUnusable: the directory is not there or in use, or the database is not ours.
        StateUnwritable: there is no room for a second database, or the like.
    """
    if not settings.state.is_dir():
        raise StateUnusable(
            f"cannot recover {settings.state}: there is no such directory",
            "give the daemon's state directory with --state",
        )
    state = StateDirectory(settings.state)
    path, report = state.path / DATABASE_NAME, RecoveryReport()
    try:
        if path.exists() and is_sound(path):
            report.say(f"{path} is in order")
            _learn(path, state, report, restored=False)
        else:
            _restore(path, state, report)
    except OSError as error:
        raise state_fault(f"cannot recover {path}", error) from error
    finally:
        state.close()
    return report.lines


def _restore(path: Path, state: StateDirectory, report: RecoveryReport) -> None:
    with _scratch(state.path / _SCRATCH) as scratch:
        copies = [copy for copy in all_copies(path) if is_sound_copy(copy, scratch)]
        model = copies[0] if copies else None
        damaged = _read(path, scratch / "damaged", model)
        read = [_read(copy, scratch / f"copy{n}", None) for n, copy in enumerate(copies[:1])]
        _refuse_what_is_not_ours(path, damaged, read)
        aside = _keep_aside(path)
        target = scratch / DATABASE_NAME
        tally = rebuild(target, damaged, read, state.last_job())
        _tell(report, path, aside, model, tally)
        _learn(target, state, report, restored=True)
        if not is_sound(target):
            raise AssertionError("the new database is not sound")
        _put_in_place(target, path)
    report.say(f"{path} is in order now; start gpuleased again")


@contextmanager
def _scratch(directory: Path) -> Iterator[Path]:
    """Return an empty directory to work in; what one before left there is removed."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(mode=0o700)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def is_sound_copy(copy: Path, scratch: Path) -> bool:
    """Tell whether a copy can be relied on; looking at it leaves nothing beside it."""
    looked_at = scratch / "look.db"
    shutil.copyfile(copy, looked_at)
    return is_sound(looked_at)


def _read(path: Path, scratch: Path, model: Path | None) -> Salvage:
    scratch.mkdir()
    return salvage(path, scratch, model) if path.exists() else Salvage()


def _refuse_what_is_not_ours(path: Path, damaged: Salvage, copies: Sequence[Salvage]) -> None:
    if damaged.tables and "jobs" not in damaged.tables and not any(it.tables for it in copies):
        raise StateUnusable(
            f"cannot recover {path}: it is not a database of gpulease",
            "give gpuleased a state directory of its own with --state",
        )


def _keep_aside(path: Path) -> Path | None:
    """Copy the damaged file, with its log, beside itself; None if there is neither."""
    log = path.with_name(f"{path.name}-wal")
    if not path.exists() and not log.exists():
        return None
    number = 1
    while any(path.parent.glob(f"{path.name}.damaged-{number}*")):
        number += 1
    aside = path.with_name(f"{path.name}.damaged-{number}")
    # The log first: a file without a name of its own is not yet kept.
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
    # A log that is not its own would be played into the new file.
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


def _tell(
    report: RecoveryReport, path: Path, aside: Path | None, copy: Path | None, tally: SalvageCounts
) -> None:
    if aside is not None and aside.exists():
        report.say(f"the damaged file is kept as {aside}")
        report.say(f"saved from it: {_counted(tally.saved)}")
    else:
        report.say(f"{path} was not there")
        if aside is not None:
            report.say(f"its log, which is of no use alone, is kept as {aside}-wal")
    if tally.copied and copy is not None:
        of = datetime.fromtimestamp(copy.stat().st_mtime, UTC).isoformat(" ", "seconds")
        report.say(f"only found in the copy {copy.name} of {of}: {_counted(tally.copied)}")
        report.say("what happened since that copy to what was found there alone is not known")
    if tally.dropped:
        report.say(f"could not be used: {_counted(tally.dropped)}")
    if tally.broken:
        names = ", ".join(_NAMES.get(name, name) for name in tally.broken)
        report.say(f"something may be missing among: {names}")


def _counted(numbers: dict[str, int]) -> str:
    parts = [f"{number} {_NAMES.get(name, name)}" for name, number in numbers.items()]
    return ", ".join(parts) or "nothing"


def _learn(path: Path, state: StateDirectory, report: RecoveryReport, *, restored: bool) -> None:
    """Take in what the jobs' own directories and processes tell."""
    seen = list(surviving_jobs(state.jobs))
    store = SqlStore(path)
    try:
        store.use_no_id_up_to(state.last_job())
        store.installation(next((it.installation for it in seen if it.installation), None))
        for witness in seen:
            _take_in(store, witness, state.job(witness.job), report)
        if restored:
            launched = {witness.job for witness in seen}
            for job in store.live():
                _end_what_cannot_go_on(store, job, job.id in launched, report)
        states = [job.state for job in store.live()]
        waiting = states.count(State.QUEUED)
        report.say(f"{len(states) - waiting} jobs hold memory, {waiting} wait")
    finally:
        store.close()


def _take_in(
    store: SqlStore, witness: SurvivingJob, directory: Path, report: RecoveryReport
) -> None:
    known, found = store.job(witness.job), witness.found
    at = datetime.now(UTC)
    if known is None:
        if found is not None:
            with store.write() as tx:
                tx.add_gpus(witness.gpus, at)
                tx.restore(found, Event(at, _EVENT, "from its processes; the record had lost it"))
            report.say(f"job {found.id} of {found.owner.user} runs: learned from its processes")
        elif witness.alive:
            # So that the daemon starts all the same.
            (directory / UNMANAGED).touch(mode=0o600)
            report.say(
                f"job {witness.job} runs, and what it leased cannot be told: its memory counts as "
                "unmanaged"
            )
        return
    changed = _as_launched(known, witness, at)
    if changed is not None:
        with store.write() as tx:
            tx.add_gpus(witness.gpus, at)
            tx.save(changed, Event(at, _EVENT, "launched, as its directory tells"))
        report.say(f"job {known.id} was launched: learned from its directory")


def _as_launched(known: Job, witness: SurvivingJob, at: datetime) -> Job | None:
    """Return a job of the record as it is, given that it was launched; None if that was known."""
    leases = witness.found.leases if witness.found is not None else ()
    if known.state is State.QUEUED:
        # How far it came since is what the daemon reads in its directory when it starts.
        started = witness.record.started
        granted_at = started.started_at if started is not None else at
        return replace(known, state=State.GRANTED, leases=leases, granted_at=granted_at)
    if known.holds_memory and not known.leases and leases:
        return replace(known, leases=leases)
    return None


def _end_what_cannot_go_on(
    store: SqlStore, job: Job, launched: bool, report: RecoveryReport
) -> None:
    if launched or job.state not in (State.QUEUED, State.GRANTED) or job.holder is not None:
        return
    if any(event.kind in _OVER for event in store.events(job.id)):
        why = "it ended before the record was damaged, and how is not known any more"
    elif _has_no_command(store, job):
        why = "its command was lost when the record was damaged; submit it again"
    else:
        return
    at = datetime.now(UTC)
    ended = asked_to_go(
        replace(job, state=State.QUEUED, leases=()), Trigger.CANCEL, Outcome.LOST, why, at
    )
    assert ended is not None, "one that waits can always be ended"
    with store.write() as tx:
        tx.save(ended, Event(at, _EVENT, why))
    report.say(f"job {job.id} of {job.owner.user} is lost: {why}")


def _has_no_command(store: SqlStore, job: Job) -> bool:
    try:
        store.invocation(job.id)
    except NoSuchJob:
        return True
    return False
