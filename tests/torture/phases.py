"""Kills at random moments: of the daemon, and of shims."""

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from daemon_rig import Zygote, wait_for
from gpulease.errors import GpuleaseError
from gpulease.shim.record import read_record
from torture import ledger
from torture.machine import Machine
from torture.orders import Book, Order
from torture.storm import Storm, drain
from torture.verdict import NO_HOLDER, NO_LEASE, Tally, compare

Say = Callable[[str], None]
_CLIENTS = 8
_SHIM = "gpulease-shim"


def kill_daemons(
    folder: Path, kills: int, rng: random.Random, say: Say, zygote: Zygote | None = None
) -> Tally:
    """Kill the daemon, so many times, in the middle of everything."""
    tally = Tally("daemon")
    machine, book = Machine(folder, zygote), Book(folder / "ledgers", rng)
    storm = Storm(machine, book, rng, _CLIENTS)
    machine.start()
    machine.ready()
    storm.begin()
    try:
        for number in range(kills):
            # Now and then before it is ready, in the middle of finding its jobs again.
            if rng.random() < 0.85:
                machine.ready()
                time.sleep(rng.uniform(0, 1.0))
            else:
                time.sleep(rng.uniform(0, 1.5))
            _look_for_strays(tally, machine, book)
            machine.kill()
            if rng.random() < 0.3:
                time.sleep(rng.uniform(0, 1))
            machine.start()
            if (number + 1) % 20 == 0:
                say(f"{number + 1} of {kills} kills; {len(book.orders)} orders")
        machine.ready()
    finally:
        storm.end()
    return _judged(tally, machine, book)


def _judged(tally: Tally, machine: Machine, book: Book) -> Tally:
    """Let everything end, end the daemon, and compare."""
    tally.kills = machine.kills if not tally.kills else tally.kills
    machine.ready()
    _look_for_strays(tally, machine, book)
    _look_for_empty_leases(tally, machine, book)
    leased = drain(machine, book)
    machine.kill(signal.SIGTERM)
    compare(tally, book.orders, machine.state / "gpulease.db", leased)
    return tally


def _look_for_strays(tally: Tally, machine: Machine, book: Book) -> None:
    """Look for processes whose job the daemon says has ended: it said so first, and they live."""
    numbers = {order.mark: order for order in book.orders if order.number is not None}
    for mark, pids in ledger.living().items():
        if (order := numbers.get(mark)) is None or order.number is None or order.indices:
            continue
        with suppress(GpuleaseError):
            shown = machine.client().job(order.number)
            while shown.retried_as is not None:
                shown = machine.client().job(shown.retried_as)
            left = ledger.living().get(mark, set()) & pids
            if shown.state in ("ended", "queued") and left:
                why = f"job {shown.id} ({order.kind}) is {shown.state}, {left} live"
                tally.fault(NO_LEASE, why)


def _look_for_empty_leases(tally: Tally, machine: Machine, book: Book) -> None:
    """Look for jobs that are said to run and have no process."""
    marks = {order.mark for order in book.orders if not order.is_hold}

    def empty() -> set[int]:
        listed = machine.insist(lambda client: client.jobs())
        alive = ledger.living()
        return {
            job.id
            for job in (listed.jobs if listed is not None else ())
            if job.name in marks and job.state in ("active", "releasing") and job.name not in alive
        }

    found = empty()
    try:
        # What ends at this very moment is no fault.
        wait_for("every lease has its holder", lambda: not (found & empty()), 20)
    except AssertionError:
        for number in found & empty():
            tally.fault(NO_HOLDER, f"job {number} holds a lease and has no process")


def kill_shims(
    folder: Path, kills: int, rng: random.Random, say: Say, zygote: Zygote | None = None
) -> Tally:
    """Kill shims of all ages, while the daemon lives and at times while it is away."""
    tally = Tally("shims")
    machine, book = Machine(folder, zygote), Book(folder / "ledgers", rng)
    storm = Storm(machine, book, rng, _CLIENTS)
    machine.start()
    machine.ready()
    storm.begin()
    try:
        while tally.kills < kills:
            time.sleep(rng.uniform(0, 0.6))
            away = rng.random() < 0.2
            if away:
                machine.kill()
            tally.kills += _kill_a_shim(machine, book, rng)
            if away and not machine.is_up():  # the look for the job's order starts it, too
                machine.start()
                machine.ready()
            if rng.random() < 0.1:
                say(f"{tally.kills} of {kills} kills; {len(book.orders)} orders")
    finally:
        storm.end()
    return _judged(tally, machine, book)


def _kill_a_shim(machine: Machine, book: Book, rng: random.Random) -> bool:
    shims = _shims(machine)
    if not shims:
        return False
    pid, directory = rng.choice(sorted(shims.items()))
    try:
        descriptor = os.pidfd_open(pid)
        if _comm(pid) != _SHIM:
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except OSError:
        return False
    wait_for("the end of the shim", lambda: not _is_running(pid))
    number = int(directory.name)
    record = read_record(directory)
    if record is None or record.exited is None:
        # The submitter may not know the number yet.
        order = wait_for("the job of the shim is known", lambda: _order_of(machine, book, number))
        # The other elements of an array go on.
        order.ends = {("lost", None)} | (order.ends if order.indices else set())
        order.notes.append("its shim was killed")
        if record is not None and record.stopping is not None:
            order.ends |= {("cancelled", None), ("time_limit", 124), ("over_lease", None)}
        if order.follow_up == "cancel":
            order.may_be_cancelled()
    return True


def _order_of(machine: Machine, book: Book, number: int) -> Order | None:
    for order in list(book.orders):
        if order.number == number:
            return order
    if not machine.is_up():
        machine.start()
        machine.ready()
    shown = machine.insist(lambda client: client.job(number))
    marks = {order.mark: order for order in list(book.orders)}
    return marks.get(shown.name) if shown is not None else None


def _shims(machine: Machine) -> dict[int, Path]:
    """Return the living shims of this machine, by their hold on a record."""
    inodes = {}
    for directory in (machine.state / "jobs").iterdir():
        with suppress(OSError):
            found = (directory / "record").stat()
            inodes[found.st_ino] = directory
    shims = {}
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        if "FLOCK" in fields and "WRITE" in fields:
            place = fields.index("WRITE")
            inode = int(fields[place + 2].rpartition(":")[2])
            if inode in inodes:
                shims[int(fields[place + 1])] = inodes[inode]
    return shims


def _comm(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def _is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"
