"""What was promised against what came: the clients, the database and the ledgers, compared."""

import sqlite3
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from torture import ledger
from torture.orders import Order

LOST, TWICE, WRONG = "lost", "started twice", "wrong end"
NO_HOLDER, NO_LEASE = "lease without a holder", "holder without a lease"
FAULTS = (LOST, TWICE, WRONG, NO_HOLDER, NO_LEASE)


@dataclass(frozen=True)
class Row:
    """A job as the database has it."""

    number: int
    state: str
    outcome: str | None
    code: int | None
    signal: int | None
    held: int
    """Bytes of its leases that were never released."""
    retry_of: int | None
    index: int | None
    """In its array."""
    started_at: int | None
    ended_at: int | None

    @property
    def status(self) -> int | None:
        """As a shell shows it."""
        if self.outcome == "time_limit":
            return 124
        return 128 + self.signal if self.signal is not None else self.code


@dataclass
class Tally:
    """The figures of one phase, and a sentence for each fault."""

    phase: str
    kills: int = 0
    submitted: int = 0
    acknowledged: int = 0
    refused: int = 0
    unacknowledged: int = 0
    unacknowledged_ran: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    told: list[str] = field(default_factory=list)

    def fault(self, kind: str, sentence: str) -> None:
        """Count a fault."""
        self.faults[kind] += 1
        self.told.append(f"{kind}: {sentence}")

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(
            self.phase,
            self.kills + other.kills,
            self.submitted + other.submitted,
            self.acknowledged + other.acknowledged,
            self.refused + other.refused,
            self.unacknowledged + other.unacknowledged,
            self.unacknowledged_ran + other.unacknowledged_ran,
            self.faults + other.faults,
            self.told + other.told,
        )


def compare(tally: Tally, orders: Iterable[Order], database: Path, leased: int) -> None:
    """Judge every order, now that all is quiet; `leased` is what the daemon last said."""
    rows = _rows(database)
    alive = ledger.living()
    for order in orders:
        if order.fate == "unsent":
            continue
        found = rows.get(order.mark, [])
        _count(tally, order)
        _judge_all(tally, order, found)
        if order.after is not None and found:
            _judge_dependency(tally, order, found, rows.get(order.after.mark, []))
        if pids := alive.get(order.mark):
            tally.fault(NO_LEASE, f"{_named(order, found)}: processes {sorted(pids)} live on")
    for row in (row for found in rows.values() for row in found):
        if row.state == "ended" and row.held:
            tally.fault(NO_HOLDER, f"job {row.number} has ended and its lease was not released")
    if leased:
        tally.fault(NO_HOLDER, f"{leased} bytes are leased, and no job is left")


def _count(tally: Tally, order: Order) -> None:
    tally.submitted += 1
    tally.acknowledged += order.fate == "acknowledged"
    tally.refused += order.fate == "refused"
    if order.fate == "unacknowledged":
        tally.unacknowledged += 1
        tally.unacknowledged_ran += ledger.entries(order.ledger)["start"] > 0


def _judge_all(tally: Tally, order: Order, found: Sequence[Row]) -> None:
    """Judge a job, or each element of an array, of which there are all or none."""
    if not order.indices:
        _judge(tally, order, found)
    elif found or order.fate == "acknowledged":
        for index in order.indices:
            _judge(tally, order.element(index), [row for row in found if row.index == index])


def _judge_dependency(
    tally: Tally, order: Order, found: Sequence[Row], awaited: Sequence[Row]
) -> None:
    """Judge whether a job ran if and only if what it waited for ended as it asked, and later."""
    continued = {row.retry_of for row in awaited}
    last = [row for row in awaited if row.number not in continued]
    fine = all((row.outcome, row.status) == ("exited", 0) or row.outcome == "released"
               for row in last)  # fmt: skip
    expected = {"ok": fine, "fail": not fine, "any": True}[order.condition]
    row, named = found[-1], _named(order, found)
    if (row.outcome != "dependency_failed") is not expected:
        how = ", ".join(f"{each.number}: {each.outcome} {each.status}" for each in last)
        tally.fault(WRONG, f"{named}: {row.outcome}, and after {order.condition} of {how}")
    elif row.started_at is not None and row.started_at < max(each.ended_at or 0 for each in last):
        tally.fault(WRONG, f"{named}: it started before what it waited for had ended")


def _judge(tally: Tally, order: Order, found: Sequence[Row]) -> None:
    wrote, named = ledger.entries(order.ledger), _named(order, found)
    # One job, or a chain in which each is the one new try of the one before.
    chain = [None, *(row.number for row in found)]
    if wrote["start"] > max(1, len(found)) or any(
        row.retry_of != before for row, before in zip(found, chain, strict=False)
    ):
        tally.fault(TWICE, f"{named}: {len(found)} jobs, started {wrote['start']} times")
    if order.fate == "refused" and (found or order.kind != "patient"):
        tally.fault(WRONG, f"{named}: it was refused, and should not, or is on record all the same")
    if not found and order.fate == "acknowledged":
        tally.fault(LOST, f"{named}: the daemon does not know it")
    elif not found and wrote:
        tally.fault(WRONG, f"{named}: it ran, and the daemon does not know it")
    elif found:
        _judge_end(tally, order, found, named)


def _judge_end(tally: Tally, order: Order, found: Sequence[Row], named: str) -> None:
    """Judge how the last of a chain ended, and that those before had a reason to be tried again."""
    wrote, row = ledger.entries(order.ledger), found[-1]
    for before in found[:-1]:
        if (before.state, before.outcome, before.status) != ("ended", "exited", 1):
            tally.fault(WRONG, f"{named}: {before.outcome} {before.status}, and was tried again")
    if row.state != "ended":
        tally.fault(LOST, f"{named}: it never ends, and is {row.state}")
        return
    if not {(row.outcome, row.status), (row.outcome, None)} & order.ends:
        expected = " or ".join(f"{how} {status}" for how, status in sorted(order.ends, key=str))
        tally.fault(WRONG, f"{named}: {row.outcome} {row.status}, and not {expected}")
    elif not order.is_hold and (why := _contradiction(found, wrote)):
        tally.fault(WRONG, f"{named}: {row.outcome} {row.status}, and yet {why}")


def _contradiction(found: Sequence[Row], wrote: Counter[str]) -> str | None:
    row = found[-1]
    if row.outcome == "exited" and (wrote["start"], wrote["end"]) != (len(found), 1):
        return f"its ledger says {dict(wrote)}"
    if row.outcome == "signaled" and wrote["start"] != 1:
        return f"its ledger says {dict(wrote)}"
    if row.outcome in ("launch_failed", "gave_up", "dependency_failed") and wrote:
        return "it ran"
    return None


def _named(order: Order, found: Sequence[Row]) -> str:
    number = found[0].number if found else order.number
    return " ".join((f"job {number}", f"({order.kind}, {order.fate}, {order.mark})", *order.notes))


def _rows(database: Path) -> dict[str, list[Row]]:
    """Read the database as it lies there, by the names of jobs."""
    rows: dict[str, list[Row]] = {}
    query = (
        "SELECT name, id, state, outcome, exit_code, exit_signal, (SELECT coalesce(sum(memory), 0) "
        "FROM leases WHERE job = jobs.id AND released_at IS NULL), retry_of, array_index, "
        "started_at, ended_at FROM jobs ORDER BY id"
    )
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        for name, *rest in connection.execute(query):
            rows.setdefault(name, []).append(Row(*rest))
    return rows


def table(tallies: Sequence[Tally]) -> str:
    """Return the figures of all phases, a column each."""
    lines = [("", *(tally.phase for tally in tallies))]
    for name, attribute in (
        ("kills", "kills"),
        ("jobs submitted", "submitted"),
        ("acknowledged", "acknowledged"),
        ("refused", "refused"),
        ("unacknowledged", "unacknowledged"),
        ("of which ran", "unacknowledged_ran"),
    ):
        lines.append((name, *(str(getattr(tally, attribute)) for tally in tallies)))
    lines += [(fault, *(str(tally.faults[fault]) for tally in tallies)) for fault in FAULTS]
    widths = [max(len(line[n]) for line in lines) for n in range(len(lines[0]))]
    return "\n".join(
        "  ".join(f"{cell:>{width}}" if n else f"{cell:<{width}}"
                  for n, (cell, width) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    )  # fmt: skip
