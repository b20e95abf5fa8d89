"""What a running job itself says of its lease: its directory, its processes, their environment.

For the recovery of a lost record alone. What an environment says is its user's word; that it counts
for no other user's job is seen to by whose the process is.
"""

import json
import os
import pwd
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from gpulease.domain.claim import Claim
from gpulease.domain.job import Job, Owner
from gpulease.domain.lease import Lease, State
from gpulease.domain.memory import GpuReading, GpuUuid, JobId
from gpulease.process import control, tree
from gpulease.process.patience import command_of
from gpulease.process.record import Record, is_alive, read_record
from gpulease.process.table import MARKER, environment_of
from gpulease.worker.environment import HOOK_VARIABLE


@dataclass(frozen=True, slots=True)
class Witness:
    """A job that was launched, as it can be seen without the record."""

    job: JobId
    record: Record
    alive: bool
    found: Job | None
    """The job as its processes show it; None where they do not."""
    gpus: tuple[GpuReading, ...] = ()
    installation: str | None = None


def witnesses(jobs: Path) -> Iterator[Witness]:
    """Yield what each job's directory tells, by id."""
    numbers = sorted(int(each.name) for each in jobs.iterdir() if each.name.isdecimal())
    for number in numbers:
        directory = jobs / str(number)
        alive = is_alive(directory)
        record = read_record(directory)
        if record is not None:
            yield _witness(JobId(number), directory, record, alive and record.exited is None)


def _witness(number: JobId, directory: Path, record: Record, alive: bool) -> Witness:
    shim = control.shim_pid(directory) if alive else None
    if shim is None and alive and record.started is not None:
        shim = record.started.shim_pid
    if shim is None:
        return Witness(number, record, alive, None)
    for pid in (each.pid for each in tree.descendants(shim)):
        environment = _environment(pid)
        installation, _, job = environment.get(MARKER, "").rpartition("/")
        if job != str(number) or not installation:
            continue
        gpus = _gpus(environment)
        found = _job(number, record, shim, pid, gpus)
        readings = tuple(reading for reading, _ in gpus)
        return Witness(number, record, alive, found, readings, installation)
    return Witness(number, record, alive, None)


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
