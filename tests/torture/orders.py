"""What is submitted: jobs that end in every way there is, each with the ends that are right."""

import random
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from gpulease.wire.requests import ClaimRequest, HoldRequest, QueueRequest, SubmitRequest

M = 1 << 20
End = tuple[str, int | None]
"""An outcome, and the exit status as a shell shows it; None: any."""
Fate = Literal["unsent", "refused", "acknowledged", "unacknowledged"]

_BEGIN = 'printf "start\\n" >>"$0"; '
_FINISH = 'printf "end\\n" >>"$0"; '


@dataclass
class Order:
    """One submission, and what is known of it."""

    mark: str
    kind: str
    ledger: Path
    argv: list[str]
    ends: set[End]
    memory: int = 0
    """Of the lease, in bytes; 0: chance picks."""
    time_limit: float | None = None
    wait: float | None = None
    retry_oom: float | None = None
    retries: int = 0
    runs_out: bool = False
    """It ends by itself; all others are cancelled or given back in the end."""
    follow_up: str | None = None
    after_s: float = 0.0
    array: str | None = None
    indices: tuple[int, ...] = ()
    """Of an array; each element has a ledger of its own."""
    after: "Order | None" = None
    """What it waits for, and how that has to end."""
    condition: Literal["ok", "fail", "any"] = "ok"
    holder: subprocess.Popen[bytes] | None = None
    fate: Fate = "unsent"
    number: int | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def is_hold(self) -> bool:
        return self.kind.startswith("hold")

    def request(self) -> SubmitRequest:
        """Return what is sent for a job."""
        return SubmitRequest(
            self.argv,
            "/",
            {"PATH": "/usr/bin:/bin", "TORTURE_JOB": self.mark},
            claim=self.claim(),
            name=self.mark,
            wait=self.wait,
            retry_oom=self.retry_oom,
            queue=QueueRequest(
                array=self.array,
                after=self._after(),
                retries=self.retries,
                retry_delay=0.1 if self.retries else None,
            ),
        )

    def _after(self) -> list[str]:
        return [] if self.after is None else [f"{self.after.number}:{self.condition}"]

    def element(self, index: int) -> "Order":
        """Return an element of an array as an order of its own."""
        ledger = self.ledger.with_name(f"{self.ledger.name}.{index}")
        return replace(self, ledger=ledger, indices=(), notes=[f"element {index}", *self.notes])

    def hold_request(self) -> HoldRequest:
        """Return what is sent for a lease without a job."""
        pid = self.holder.pid if self.holder is not None else None
        return HoldRequest({"PATH": "/usr/bin:/bin"}, pid, self.claim(), name=self.mark)

    def claim(self) -> ClaimRequest:
        return ClaimRequest(memory=self.memory, time_limit=self.time_limit)

    def may_be_cancelled(self) -> None:
        """Note that it is going to be cancelled, whether or not anybody hears of that."""
        self.ends |= {("cancelled", None), ("released", None)} if self.is_hold else {
            ("cancelled", None)
        }  # fmt: skip


class Book:
    """Makes orders, and keeps them all."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.orders: list[Order] = []
        self._rng = rng
        self._lock = threading.Lock()

    def any_order(self, *, by_command: bool = False) -> Order:
        """Return an order of a kind that chance picks."""
        with self._lock:
            kinds = _KINDS_OF_THE_COMMAND if by_command else _KINDS
            return self._order(self._rng.choice(kinds))

    def order(self, kind: str) -> Order:
        """Return an order of this kind."""
        with self._lock:
            return self._order(kind)

    def _order(self, kind: str) -> Order:
        mark = f"torture-{self._rng.getrandbits(64):016x}"
        ledger = self.folder / mark
        made = _MAKERS[kind](mark, ledger, self._rng)
        if kind == "dependent":
            self._depend(made)
        made.memory = made.memory or self._rng.choice((512, 1024, 2048)) * M
        self.orders.append(made)
        return made

    def _depend(self, made: Order) -> None:
        known = [order for order in self.orders if order.number is not None]
        if known:
            # Of the latest: most of the others have ended.
            made.after = self._rng.choice(known[-8:])
            made.condition = self._rng.choice(("ok", "fail", "any"))

    def end_holders(self) -> None:
        """End every process that a lease may be held by."""
        for order in self.orders:
            if order.holder is not None:
                # Its lease is given back with that, maybe before anybody can cancel it.
                order.ends.add(("released", None))
                order.holder.kill()
                order.holder.wait()


def _job(mark: str, ledger: Path, kind: str, script: str, *ends: End, **more: object) -> Order:
    argv = ["sh", "-c", _BEGIN + script, str(ledger)]
    return Order(mark, kind, ledger, argv, set(ends), **more)  # type: ignore[arg-type]


def _exits(mark: str, ledger: Path, rng: random.Random) -> Order:
    code, nap = rng.choice((0, 0, 1, 3, 42, 255)), rng.choice((0, rng.uniform(0, 1)))
    script = f"sleep {nap:.3f}; {_FINISH} exit {code}"
    return _job(mark, ledger, "exits", script, ("exited", code), runs_out=True)


def _signaled(mark: str, ledger: Path, rng: random.Random) -> Order:
    number = rng.choice((signal.SIGTERM, signal.SIGKILL, signal.SIGUSR1, signal.SIGSEGV))
    script = f"sleep {rng.uniform(0, 0.5):.3f}; ulimit -c 0; kill -{number} $$"
    return _job(mark, ledger, "signaled", script, ("signaled", 128 + number), runs_out=True)


def _leaves(mark: str, ledger: Path, rng: random.Random) -> Order:
    code = rng.choice((0, 5))
    left = f'setsid sh -c \'sleep {rng.uniform(0.2, 1):.3f}; printf "left\\n" >>"$0"\' "$0" &'
    return _job(
        mark, ledger, "leaves", f"{left} {_FINISH} exit {code}", ("exited", code), runs_out=True
    )


def _cancelled(mark: str, ledger: Path, rng: random.Random) -> Order:
    script = "setsid sleep 600 & sleep 600"
    return _job(mark, ledger, "cancelled", script, follow_up="cancel", after_s=rng.uniform(0, 1.5))


def _stubborn(mark: str, ledger: Path, rng: random.Random) -> Order:
    script = "trap '' TERM; while :; do sleep 0.2; done"
    return _job(mark, ledger, "stubborn", script, follow_up="cancel", after_s=rng.uniform(0, 1))


def _limited(mark: str, ledger: Path, rng: random.Random) -> Order:
    limit = rng.uniform(1, 1.6)
    return _job(
        mark, ledger, "limited", "sleep 600", ("time_limit", 124), time_limit=limit, runs_out=True
    )


def _extended(mark: str, ledger: Path, rng: random.Random) -> Order:
    """Whether it gets more time in time decides how it ends; see `storm`."""
    script = f"sleep {rng.uniform(5.4, 5.7):.3f}; {_FINISH} exit 9"
    ends: tuple[End, ...] = (("time_limit", 124), ("exited", 9))
    # Seconds: a machine under load must see it run, and extend it, within its first limit.
    return _job(
        mark, ledger, "extended", script, *ends, time_limit=5, runs_out=True, follow_up="extend"
    )


def _patient(mark: str, ledger: Path, rng: random.Random) -> Order:
    ends: tuple[End, ...] = (("exited", 0), ("gave_up", None))
    wait = rng.choice((0.0, 0.3))
    return _job(mark, ledger, "patient", _FINISH, *ends, wait=wait, runs_out=True)


def _fails(mark: str, ledger: Path, rng: random.Random) -> Order:
    argv, code = rng.choice(((["/nowhere/at-all"], 127), (["/etc"], 126)))
    return Order(mark, "fails", ledger, argv, {("launch_failed", code)}, runs_out=True)


def _retried(mark: str, ledger: Path, rng: random.Random) -> Order:
    """Fails the first time, and is tried again by a job that has the same mark."""
    by_size = rng.random() < 0.5
    says = "CUDA out of memory. Tried to allocate 1.00 GiB" if by_size else "no license is free"
    fails = f'test "$(grep -c start "$0")" -gt 1 || {{ echo "{says}" >&2; exit 1; }}'
    script = f"sleep {rng.uniform(0, 0.5):.3f}; {fails}; {_FINISH} exit 0"
    again = {"retry_oom": 1.5} if by_size else {"retries": 1}
    return _job(mark, ledger, "retried", script, ("exited", 0), runs_out=True, **again)


def _hungry(mark: str, ledger: Path, _: random.Random) -> Order:
    """Holds more than its lease until it is stopped."""
    holds = f"import time; held = b'x' * {400 * M}; time.sleep(600)"
    made = _job(mark, ledger, "hungry", f'exec {sys.executable} -Sc "{holds}"', runs_out=True)
    made.memory, made.ends = 320 * M, {("over_lease", None)}
    return made


def _dropped(mark: str, ledger: Path, _: random.Random) -> Order:
    """Has a process that has dropped its environment, and is in the session of its job."""
    script = f"env -i sh -c 'while :; do sleep 0.2; done' {mark} & sleep 600"
    return _job(mark, ledger, "dropped", script, follow_up="cancel", after_s=1.0)


def _array(mark: str, ledger: Path, rng: random.Random) -> Order:
    """Three jobs with one invocation, two at once."""
    code = rng.choice((0, 0, 3))
    script = f"{_BEGIN} sleep {rng.uniform(0, 0.4):.3f}; {_FINISH} exit {code}"
    argv = ["sh", "-c", 'exec sh -c "$1" "$0.$GPULEASE_ARRAY_INDEX"', str(ledger), script]
    return Order(
        mark, "array", ledger, argv, {("exited", code)}, runs_out=True, array="0-4:2%2",
        indices=(0, 2, 4),
    )  # fmt: skip


def _dependent(mark: str, ledger: Path, _: random.Random) -> Order:
    """Waits for another order; `verdict` compares how both ended."""
    ends: tuple[End, ...] = (("exited", 0), ("dependency_failed", None))
    return _job(mark, ledger, "dependent", f"{_FINISH} exit 0", *ends, runs_out=True)


def _hold(mark: str, ledger: Path, kind: str, **more: object) -> Order:
    holder = None
    if kind != "hold for a time":
        holder = subprocess.Popen(["sleep", "600"])
    return Order(mark, kind, ledger, [], set(), holder=holder, **more)  # type: ignore[arg-type]


def _hold_released(mark: str, ledger: Path, rng: random.Random) -> Order:
    return _hold(mark, ledger, "hold given back", follow_up="cancel", after_s=rng.uniform(0, 1))


def _hold_orphaned(mark: str, ledger: Path, rng: random.Random) -> Order:
    more = {"follow_up": "end holder", "after_s": rng.uniform(0, 1), "runs_out": True}
    made = _hold(mark, ledger, "hold of who ends", **more)
    made.ends = {("released", None)}
    return made


def _hold_timed(mark: str, ledger: Path, rng: random.Random) -> Order:
    made = _hold(mark, ledger, "hold for a time", time_limit=rng.uniform(1, 1.6), runs_out=True)
    made.ends = {("time_limit", None)}
    return made


_MAKERS = {
    "exits": _exits,
    "signaled": _signaled,
    "leaves": _leaves,
    "cancelled": _cancelled,
    "stubborn": _stubborn,
    "limited": _limited,
    "extended": _extended,
    "patient": _patient,
    "fails": _fails,
    "retried": _retried,
    "hungry": _hungry,
    "dropped": _dropped,
    "array": _array,
    "dependent": _dependent,
    "hold given back": _hold_released,
    "hold of who ends": _hold_orphaned,
    "hold for a time": _hold_timed,
}
_KINDS = ("exits", "exits", "exits", "array", "dependent", "dependent", *_MAKERS)
_KINDS_OF_THE_COMMAND = ("exits", "exits", "signaled", "cancelled", "leaves")
