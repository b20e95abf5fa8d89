"""A kill at each step between look, decide, commit and act, one after the other.

The daemon and its shims are real and cross points (see `wounds` and `spawner`); at each step one of
them is killed there, and whoever comes next has to make good.
"""

import random
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from daemon_rig import Zygote
from torture.machine import Machine
from torture.orders import Book
from torture.points import AFTER_DAEMON, HERE, LATE, WAIT, WITH_DAEMON
from torture.scenarios import Stage, Step
from torture.storm import drain
from torture.verdict import LOST, Tally, compare


def _both(verb: str, scenario: str) -> tuple[Step, Step]:
    return Step(f"{verb}: before its commit", scenario), Step(f"{verb}: after its commit", scenario)


STEPS: tuple[Step, ...] = (
    *_both("submit", "exits"),
    Step("after the answer", "answered"),
    *_both("grant", "exits"),
    Step("launch: before it is handed on"),
    Step("handed on"),
    Step("launch: before the word to the shim", enclosed=True),
    Step("shim: before its claim", action=AFTER_DAEMON),
    Step("shim: before its claim", action=LATE),
    Step("shim: before its claim", "cancelled before its claim", WAIT),
    Step("shim: after its claim", action=AFTER_DAEMON),
    Step("shim: after its claim", action=LATE),
    Step("shim: before it forks", action=AFTER_DAEMON),
    Step("shim: after it has forked", action=LATE),
    Step("shim: before the start is noted", action=AFTER_DAEMON),
    Step("shim: when the start is written", action=AFTER_DAEMON),
    *_both("started", "runs"),
    Step("shim: before the end is noted", action=LATE),
    Step("shim: when the end is written", action=AFTER_DAEMON),
    Step("shim: when the end is written", action=WITH_DAEMON),
    *_both("ended", "exits"),
    *_both("main exited", "leaves"),
    *_both("launch failed", "fails"),
    *_both("expired", "limited"),
    *_both("ended", "retried"),
    *_both("notice", "hungry"),
    *_both("revoke", "hungry"),
    Step("stop: before the shim is told", "hungry"),
    Step("stop: told", "hungry"),
    *_both("cancel", "cancel"),
    Step("stop: before the shim is told", "cancel"),
    Step("stop: told", "cancel"),
    *_both("extend", "extend"),
    Step("extend: before the shim is told", "extend"),
    Step("extend: told", "extend"),
    *_both("submit", "hold"),
    *_both("grant", "hold"),
    *_both("started", "hold"),
    *_both("cancel", "give back"),
    *_both("ended", "give back"),
    *_both("ended", "holder ends"),
    Step("shim: before its claim", "shim lost early", HERE),
    Step("shim: after its claim", "shim lost", HERE),
    Step("shim: after its claim", "shim lost", WITH_DAEMON),
    Step("shim: after it has forked", "shim lost", HERE),
    Step("shim: before the start is noted", "shim lost with its job running", WAIT),
    Step("shim: when the start is written", "shim lost", HERE),
    Step("shim: when the start is written", "shim lost", WITH_DAEMON),
    Step("shim: before the end is noted", "end lost", HERE),
    Step("shim: before the end is noted", "end lost", WITH_DAEMON),
    Step("shim: when the end is written", "exits", HERE),
)


def kill_at_each_step(
    folder: Path,
    seed: int,
    zygote: Zygote,
    say: Callable[[str], None],
    steps: Sequence[Step] = STEPS,
    players: int = 3,
) -> Tally:
    """Play the steps, on so many machines side by side: most of the time they wait."""

    def play(player: int) -> Tally:
        place = folder / str(player)
        place.mkdir()
        book = Book(place / "ledgers", random.Random(f"{seed} {player}"))
        return _play_all(place, book, zygote, say, steps[player::players])

    with ThreadPoolExecutor(players) as pool:
        return sum(pool.map(play, range(players)), Tally("steps"))


def _play_all(
    folder: Path, book: Book, zygote: Zygote, say: Callable[[str], None], steps: Sequence[Step]
) -> Tally:
    """Play `steps` on one state, and compare in the end."""
    tally = Tally("steps")
    machine = Machine(folder, zygote)
    stage = Stage(machine, book)
    machine.start()
    for step in steps:
        before = len(book.orders)
        begun = time.monotonic()
        try:
            stage.play(step)
        except AssertionError as error:
            tally.fault(LOST, f"in the step {step}: {error}")
            if not machine.is_up():
                machine.start()
        for order in book.orders[before:]:
            order.notes.append(f"in the step {step}")
        say(f"{time.monotonic() - begun:5.1f} s: {step}")
    machine.ready()
    leased = drain(machine, book)
    machine.kill(signal.SIGTERM)
    compare(tally, book.orders, machine.state / "gpulease.db", leased)
    # One for each step, of the daemon or of a shim or of both; some take several starts.
    tally.kills = len(steps)
    return tally
