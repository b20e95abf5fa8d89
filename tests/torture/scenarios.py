"""How a machine comes to the point of a step, and how it goes on from there."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from daemon_rig import wait_for
from gpulease.errors import GpuleaseError
from torture import ledger, points
from torture.machine import Machine
from torture.orders import Book, Order
from torture.points import AFTER_DAEMON, HERE, LATE, WAIT, WITH_DAEMON
from torture.storm import drain, submit

_EXTENDED_RUNS_S = 5.9


@dataclass(frozen=True)
class Step:
    """Who is killed at which point, in which scenario."""

    point: str
    scenario: str = "exits"
    action: str = HERE
    enclosed: bool = False

    def __str__(self) -> str:
        return f"{self.scenario}: {self.point}: {self.action}"


class Stage:
    """Plays scenarios on one machine, one after the other."""

    def __init__(self, machine: Machine, book: Book) -> None:
        self.machine = machine
        self.book = book

    def play(self, step: Step) -> None:
        """Come to the point, kill, start anew, and see everything end."""
        if step.enclosed:
            self.machine.kill(signal.SIGTERM)
            self.machine.start(enclosed=True)
        self.machine.ready()
        _SCENARIOS[step.scenario](self, step)
        if step.action in (HERE, WITH_DAEMON, AFTER_DAEMON, LATE) and self._dies(step):
            self.machine.gone()
        if not self.machine.is_up():
            self.machine.start()
            self.machine.ready()
        points.let_go(self.machine.folder)
        if step.action in (WAIT, LATE):
            self._let_late_one_arrive()
        drain(self.machine, self.book)

    def _dies(self, step: Step) -> bool:
        """Tell whether the step kills the daemon."""
        return step.action != HERE or not step.point.startswith("shim")

    def _let_late_one_arrive(self) -> None:
        pid = points.struck(self.machine.folder)
        order = self.book.orders[-1]
        wait_for(
            "the late shim goes on",
            lambda: pid is None or not _exists(pid) or ledger.entries(order.ledger)["start"],
        )

    def arm(self, step: Step) -> None:
        points.arm(self.machine.folder, step.point, step.action)

    def reached(self, step: Step) -> int:
        """Wait until somebody has come to the point."""
        struck = wait_for(f"the point of {step}", lambda: points.struck(self.machine.folder))
        assert struck is not None
        return struck

    def submit(self, kind: str) -> Order:
        order = self.book.order(kind)
        submit(self.machine.client(), order)
        return order

    def submit_and_see(self, kind: str) -> Order:
        """Submit, and wait until it runs or is held."""
        order = self.submit(kind)
        self.wait_for_state(order, "active")
        if not order.is_hold:
            wait_for("it has begun", lambda: ledger.entries(order.ledger)["start"])
        return order

    def wait_for_state(self, order: Order, state: str) -> None:
        number = order.number
        if number is None:
            raise AssertionError(f"{order.mark} was {order.fate}: {order.notes}")
        client = self.machine.client()
        wait_for(f"job {number} is {state}", lambda: client.job(number).state == state)


def _kind(kind: str) -> Callable[[Stage, Step], None]:
    """Return the scenario in which a job of this kind comes to the point by itself."""

    def scenario(stage: Stage, step: Step) -> None:
        stage.arm(step)
        stage.submit(kind)
        stage.reached(step)

    return scenario


def _answered(stage: Stage, _: Step) -> None:
    stage.submit("exits")
    stage.machine.kill()


def _cancel(kind: str) -> Callable[[Stage, Step], None]:
    def scenario(stage: Stage, step: Step) -> None:
        order = stage.submit_and_see(kind)
        stage.arm(step)
        order.may_be_cancelled()
        with suppress(GpuleaseError):
            stage.machine.client().cancel(order.number or 0)
        stage.reached(step)

    return scenario


def _cancel_early(stage: Stage, step: Step) -> None:
    """The cancelled job is seen to have ended before its shim, started by another daemon, comes."""
    stage.arm(step)
    order = stage.submit("cancelled")
    stage.reached(step)
    order.may_be_cancelled()
    stage.machine.client().cancel(order.number or 0)
    stage.machine.kill()
    stage.machine.start()
    stage.machine.ready()
    stage.wait_for_state(order, "ended")


def _extend(stage: Stage, step: Step) -> None:
    """The daemon stays away until the old limit would have ended the job."""
    order = stage.submit_and_see("extended")
    begun = time.monotonic()
    stage.arm(step)
    with suppress(GpuleaseError):
        stage.machine.client().extend(order.number or 0, 600)
        order.ends.discard(("time_limit", 124))
        order.notes.append("was extended")
    stage.reached(step)
    time.sleep(max(0.0, begun + _EXTENDED_RUNS_S - time.monotonic()))


def _holder_ends(stage: Stage, step: Step) -> None:
    order = stage.submit_and_see("hold of who ends")
    stage.arm(step)
    assert order.holder is not None
    order.holder.kill()
    order.holder.wait()
    stage.reached(step)


def _shim_lost_early(stage: Stage, step: Step) -> None:
    """Nothing had been launched: it is launched again."""
    stage.arm(step)
    stage.submit("exits")
    stage.reached(step)


def _shim_lost(kind: str) -> Callable[[Stage, Step], None]:
    def scenario(stage: Stage, step: Step) -> None:
        stage.arm(step)
        order = stage.submit(kind)
        order.ends = {("lost", None)}
        order.runs_out = True
        stage.reached(step)

    return scenario


def _shim_lost_running(stage: Stage, step: Step) -> None:
    """The job is up before its shim has noted that."""
    stage.arm(step)
    order = stage.submit("cancelled")
    order.ends = {("lost", None)}
    order.runs_out = True
    shim = stage.reached(step)
    wait_for("it has begun", lambda: len(ledger.living().get(order.mark, ())) >= 3)
    os.kill(shim, signal.SIGKILL)


_SCENARIOS: dict[str, Callable[[Stage, Step], None]] = {
    "exits": _kind("exits"),
    # The start of a job that has ended already is stored with its end, and is no verb by itself.
    "runs": _kind("cancelled"),
    "leaves": _kind("leaves"),
    "fails": _kind("fails"),
    "limited": _kind("limited"),
    "retried": _kind("retried"),
    "hungry": _kind("hungry"),
    "hold": _kind("hold given back"),
    "answered": _answered,
    "cancel": _cancel("cancelled"),
    "give back": _cancel("hold given back"),
    "cancelled before its claim": _cancel_early,
    "extend": _extend,
    "holder ends": _holder_ends,
    "shim lost early": _shim_lost_early,
    "shim lost": _shim_lost("cancelled"),
    "end lost": _shim_lost("exits"),
    "shim lost with its job running": _shim_lost_running,
}


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
