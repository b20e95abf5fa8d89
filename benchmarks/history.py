"""A state directory with a year of history: jobs, their events, leases and folders, and samples.

Three jobs at a time on each of eight GPUs, an hour each on average.
"""

import json
import random
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

from gpulease.config import DATABASE_NAME
from gpulease.gpu.simulated import simulated_uuid
from gpulease.store.database_file import back_up
from gpulease.store.memory_history import JOB_RESOLUTIONS, RESOLUTIONS, Resolution
from gpulease.store.store import SqlStore

G = 1024**3
JOBS = 200_000
GPUS = 8
YEAR = timedelta(days=364)
KEPT_FOR = timedelta(days=30)
"""The default of keep_output_for."""
_USERS = 40
_COMMANDS = 400
_MEAN_RUN_S, _LONGEST_RUN_S = 3600, 2 * 86400
_EVENTS = ("submit", "grant", "worker_started", "worker_exited")


def write_year(state: Path) -> None:
    """Make a state directory at `state`, as a daemon leaves it after a year and 200,000 jobs.

    The daemon that uses it simulates `GPUS` GPUs.
    """
    (state / "jobs").mkdir(parents=True)
    SqlStore(state / DATABASE_NAME).close()
    now = datetime.now(UTC)
    uuids = [simulated_uuid(str(state), index) for index in range(GPUS)]
    with closing(sqlite3.connect(state / DATABASE_NAME)) as connection, connection:
        _insert(connection, "gpus", (_gpu(uuid, place, now) for place, uuid in enumerate(uuids)))
        _insert(connection, "jobs", (_job(number, now) for number in _numbers()))
        _insert(connection, "leases", (_lease(number, uuids, now) for number in _numbers()))
        _insert(connection, "events", (each for n in _numbers() for each in _events_of(n, now)))
        _insert(connection, "gpu_memory", _samples(uuids, now))
        _insert(connection, "job_memory", _job_samples(now))
    for number in _numbers():
        if now - _ended_at(number, now) < KEPT_FOR:
            _write_folder(state / "jobs" / str(number), _ended_at(number, now))
    back_up(state / DATABASE_NAME)


def _numbers() -> range:
    return range(1, JOBS + 1)


def _insert(connection: sqlite3.Connection, table: str, rows: Iterator[dict[str, object]]) -> None:
    first = next(rows)
    places = ", ".join(f":{each}" for each in first)
    statement = f"INSERT INTO {table} ({', '.join(first)}) VALUES ({places})"
    connection.execute(statement, first)
    connection.executemany(statement, rows)


def _us(at: datetime) -> int:
    return round(at.timestamp() * 1_000_000)


def _ended_at(number: int, now: datetime) -> datetime:
    return now - YEAR * (1 - number / JOBS) - timedelta(minutes=1)


def _draw(number: int) -> random.Random:
    return random.Random(number)


def _gpu(uuid: str, place: int, now: datetime) -> dict[str, object]:
    seen = {"first_seen_at": _us(now - YEAR), "last_seen_at": _us(now)}
    name = "Simulated 80G"
    return {"uuid": uuid, "number": place + 1, "gpu_index": place, "name": name, **seen}


def _run_for(number: int) -> timedelta:
    seconds = _draw(-number).expovariate(1 / _MEAN_RUN_S)
    return timedelta(seconds=10 + min(seconds, _LONGEST_RUN_S))


def _job(number: int, now: datetime) -> dict[str, object]:
    draw = _draw(number)
    user, command = draw.randrange(_USERS), draw.randrange(_COMMANDS)
    ended, ran = _ended_at(number, now), _run_for(number)
    return {
        "id": number,
        "uid": 1000 + user,
        "gid": 1000 + user,
        "user": f"user{user}",
        "name": f"train{command}.py",
        "command": f"/home/user{user}/env/bin/python train{command}.py --learning-rate 0.{number}",
        "memory": draw.randrange(1, 40) * G,
        "gpus": 1,
        "exclusive": 0,
        "state": "ended",
        "submitted_at": _us(ended - ran - timedelta(seconds=draw.randrange(3600))),
        "granted_at": _us(ended - ran),
        "started_at": _us(ended - ran),
        "ended_at": _us(ended),
        "pid": 2 * number,
        "shim_pid": 2 * number - 1,
        "outcome": "exited",
        "exit_code": 0,
        "alike": f"{command:032x}",
        "same": f"{number:032x}",
        "predicted_run_us": ran // timedelta(microseconds=1),
        "utilization": draw.randrange(101),
    }


def _lease(number: int, uuids: Sequence[str], now: datetime) -> dict[str, object]:
    job = _job(number, now)
    return {
        "job": number,
        "gpu": uuids[number % GPUS],
        "place": 0,
        "memory": job["memory"],
        "granted_at": job["granted_at"],
        "released_at": job["ended_at"],
        "peak": G,
        "used": G,
        "enforced_by": "framework,watch",
    }


def _events_of(number: int, now: datetime) -> Iterator[dict[str, object]]:
    job = _job(number, now)
    instants = ("submitted_at", "granted_at", "started_at", "ended_at")
    for kind, instant in zip(_EVENTS, instants, strict=True):
        yield {"job": number, "at": job[instant], "kind": kind, "detail": "on GPU 3"}


def _samples(uuids: Sequence[str], now: datetime) -> Iterator[dict[str, object]]:
    for uuid in uuids:
        for span, at in _spans(RESOLUTIONS, now - YEAR, now, now):
            draw = _draw(at)
            used, committed = draw.randrange(80 * G), draw.randrange(80 * G)
            values: dict[str, int | None] = {
                "used": used, "leased": committed, "committed": committed, "unmanaged": 0,
                "utilization": draw.randrange(101), "temperature": 30 + draw.randrange(50),
                "power": 60 + draw.randrange(300),
            }  # fmt: skip
            # A row of one sample has no sums.
            known_s = span if span > RESOLUTIONS[0].seconds else None
            yield {"uuid": uuid, "resolution": span, "at": at, **_with_sums(values, known_s)}


def _with_sums(values: dict[str, int | None], seconds: int | None) -> dict[str, object]:
    """Return values, with sums as if each were half of the time at its largest."""
    found: dict[str, object] = {**values}
    for name, value in values.items():
        is_known = value is not None and seconds is not None
        found[f"{name}_sum"] = value * seconds // 2 if value is not None and seconds else None
        found[f"{name}_seconds"] = seconds if is_known else None
    return found


def _job_samples(now: datetime) -> Iterator[dict[str, object]]:
    for number in _numbers():
        draw, ended = _draw(number), _ended_at(number, now)
        for span, at in _spans(JOB_RESOLUTIONS, ended - _run_for(number), ended, now):
            used, busy = draw.randrange(20 * G), draw.randrange(101)
            values: dict[str, int | None] = {"used": used, "pool": None, "utilization": busy}
            key = {"gpu": number % GPUS + 1, "resolution": span, "at": at, "job": number}
            yield {**key, **_with_sums(values, span)}


def _spans(
    resolutions: Sequence[Resolution], begin: datetime, end: datetime, now: datetime
) -> Iterator[tuple[int, int]]:
    """Yield the rows that are kept of some time: their seconds and begins in microseconds."""
    newer = now
    for each in resolutions:
        older = now - each.keep_for
        first, last = int(max(begin, older).timestamp()), int(min(end, newer).timestamp())
        for at in range(first // each.seconds * each.seconds, last, each.seconds):
            yield each.seconds, at * 1_000_000
        newer = older


def _write_folder(folder: Path, ended: datetime) -> None:
    folder.mkdir()
    lines = (
        {"event": "claimed", "shim_pid": 1},
        {"event": "started", "pid": 2, "shim_pid": 1, "started_at": ended.isoformat()},
        {"event": "exited", "reason": "exited", "exit_code": 0, "ended_at": ended.isoformat()},
    )
    record = "".join(json.dumps(each) + "\n" for each in lines)
    (folder / "record").write_bytes(record.encode().ljust(4096, b"\0"))
    (folder / "stdout").write_text("epoch 1: loss 0.5\n")
    (folder / "stderr").touch()
