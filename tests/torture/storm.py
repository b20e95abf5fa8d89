"""A steady stream of submissions and ends, from several clients, whatever becomes of them."""

import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from gpulease.client import Client
from gpulease.errors import GpuleaseError, NoDaemon
from gpulease.wire.jobs import JobView
from torture.machine import Machine
from torture.orders import Book, Order

_MOST_LIVE = 24
"""Jobs that wait or run; more would only wait."""


def submit(client: Client, order: Order) -> bool:
    """Submit; what is known afterwards stands in the order. Tell whether a daemon was there."""
    try:
        send = client.hold if order.is_hold else client.submit
        shown = send(order.hold_request() if order.is_hold else order.request())
    except NoDaemon as error:
        if isinstance(error.__cause__, FileNotFoundError | ConnectionRefusedError):
            return False
        order.fate = "unacknowledged"
    except GpuleaseError as error:
        order.fate = "refused"
        order.notes.append(error.message)
    else:
        order.fate, order.number = "acknowledged", shown.id
    return True


def submit_by_command(machine: Machine, order: Order) -> None:
    """Submit as a user does."""
    command = [sys.executable, "-m", "gpulease.cli", "--socket", str(machine.socket), "run", "-d"]
    command += ["--name", order.mark, "--mem", f"{order.memory >> 20}M", "--", *order.argv]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False,
        env={"PATH": "/usr/bin:/bin", "TORTURE_JOB": order.mark},
    )  # fmt: skip
    if done.returncode == 0:
        order.fate, order.number = "acknowledged", int(done.stdout)
    elif "no socket" in done.stderr or "nothing listens" in done.stderr:
        order.fate = "unsent"
    elif "cannot reach the daemon" in done.stderr or "lost connection" in done.stderr:
        order.fate = "unacknowledged"
    else:
        order.fate = "refused"
        order.notes.append(done.stderr)


class Storm:
    """Clients that submit until they are told to stop."""

    def __init__(self, machine: Machine, book: Book, rng: random.Random, clients: int) -> None:
        self._machine = machine
        self._book = book
        self._over = threading.Event()
        self._busy = threading.Event()
        jobs = [(self._by_client, random.Random(rng.random())) for _ in range(clients)]
        jobs.append((self._by_command, random.Random(rng.random())))
        self._threads = [threading.Thread(target=each, args=(own,)) for each, own in jobs]

    def begin(self) -> None:
        for thread in (*self._threads, threading.Thread(target=self._watch_the_queue)):
            thread.start()

    def end(self) -> None:
        """Submit nothing more."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _watch_the_queue(self) -> None:
        while not self._over.wait(0.2):
            with suppress(GpuleaseError):
                live = self._machine.client().jobs().jobs
                (self._busy.set if len(live) > _MOST_LIVE else self._busy.clear)()
                self._end_what_nobody_knows(live)

    def _end_what_nobody_knows(self, live: Sequence[JobView]) -> None:
        """Cancel endless jobs that were not acknowledged: nobody else will."""
        orders = {order.mark: order for order in list(self._book.orders)}
        for job in live:
            order = orders.get(job.name)
            if order is not None and order.fate == "unacknowledged" and not order.runs_out:
                order.may_be_cancelled()
                self._machine.client().cancel(job.id)

    def _by_client(self, rng: random.Random) -> None:
        order = self._book.any_order()
        while not self._over.is_set():
            if self._busy.is_set() or not submit(self._machine.client(), order):
                self._over.wait(0.02)
                continue
            self._follow_up(order)
            self._over.wait(rng.uniform(0, 0.3))
            order = self._book.any_order()

    def _by_command(self, rng: random.Random) -> None:
        while not self._over.is_set():
            if not self._busy.is_set():
                order = self._book.any_order(by_command=True)
                submit_by_command(self._machine, order)
                self._follow_up(order)
            self._over.wait(rng.uniform(0.2, 1))

    def _follow_up(self, order: Order) -> None:
        """Do what is to be done to a job while it waits or runs, as far as anybody hears of it."""
        if order.follow_up is None or order.number is None:
            return
        self._over.wait(order.after_s)
        if order.follow_up == "end holder":
            assert order.holder is not None
            order.holder.kill()
            order.holder.wait()
        elif order.follow_up == "extend":
            _extend(self._machine.client(), order)
        else:
            order.may_be_cancelled()
            self._cancel(order.number)

    def _cancel(self, number: int) -> None:
        """Cancel a job, again until somebody has heard of it."""
        while not self._over.wait(0.02):
            try:
                self._machine.client().cancel(number)
            except NoDaemon:
                continue
            except GpuleaseError:
                return
            return


def _extend(client: Client, order: Order) -> None:
    assert order.number is not None
    with suppress(GpuleaseError):
        client.extend(order.number, 600)
        # From here the daemon has promised it.
        order.ends.discard(("time_limit", 124))
        order.notes.append("was extended")


def drain(machine: Machine, book: Book) -> int:
    """Have everything end that does not end by itself, wait for it, and return what is leased."""
    book.end_holders()
    endless = {order.mark for order in book.orders if not order.runs_out}
    by_mark = {order.mark: order for order in book.orders}
    deadline = time.monotonic() + 90
    asked: set[int] = set()
    while time.monotonic() < deadline:
        live = machine.insist(lambda client: client.jobs())
        if live is not None and not live.jobs:
            break
        for job in live.jobs if live is not None else ():
            if job.name in endless and job.id not in asked:
                by_mark[job.name].may_be_cancelled()
                machine.insist(lambda client, number=job.id: client.cancel(number))
                asked.add(job.id)
        time.sleep(0.1)
    status = machine.insist(lambda client: client.status())
    return sum(gpu.memory.leased for gpu in status.gpus) if status is not None else -1
