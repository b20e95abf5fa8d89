"""What keys mean while attached: for the job, for its end, or for this command alone.

Pure: the time is an argument, and what is to be done comes back as a value.
"""

import signal
from dataclasses import dataclass
from enum import Enum

from gpulease.cli.attaching.keys import DetachKeys

AGAIN_WITHIN = 1.0
"""Seconds: a second Ctrl-C as soon as this means it."""
_HEARD = 16
_CONTROL = 0x40


class Use(Enum):
    """What a keyboard is there for."""

    WRITE = "write"
    """Keys are the job's, all but those that detach."""
    COMMAND = "command"
    """The job reads no keys: those that a terminal makes signals of are signals for it."""
    WATCH = "watch"
    """Nothing that is typed reaches the job."""


@dataclass(frozen=True, slots=True)
class Controls:
    """The characters of a terminal that are signals, each one byte, or none where it is off."""

    interrupt: bytes = b"\x03"
    quit: bytes = b"\x1c"
    suspend: bytes = b"\x1a"


@dataclass(frozen=True, slots=True)
class Pressed:
    """What a piece of typing asks for."""

    passed: bytes = b""
    """For the job's standard input."""
    signals: tuple[signal.Signals, ...] = ()
    interrupt: bool = False
    """Ctrl-C is among what is passed."""
    cancel: bool = False
    suspend: bool = False
    """Stop this command, and nothing else."""
    detach: bool = False


class Interrupts:
    """Tell a Ctrl-C that insists from one that the job takes care of.

    It insists where the one before came just now, and all that the job's terminal has shown since
    is its echo: a program that reads keys itself echoes none, and one that handles the signal
    mostly has something to say.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._echo = b"^" + bytes(each ^ _CONTROL for each in key)
        self._at: float | None = None
        self._heard = b""

    def typed(self, piece: bytes, now: float) -> bool:
        """Return whether this piece insists on the end of the job; `now` is in seconds."""
        alone = bool(self._key) and piece == self._key
        recent = self._at is not None and now - self._at < AGAIN_WITHIN
        insists = alone and recent and self._heard == self._echo
        self._at = now if alone and not insists else None
        self._heard = b""
        return insists

    def heard(self, piece: bytes) -> None:
        """Note what the job's terminal has shown."""
        self._heard = (self._heard + piece[:_HEARD])[:_HEARD]


class Keyboard:
    """Read the keys of one terminal for one job."""

    def __init__(self, keys: bytes, controls: Controls, use: Use) -> None:
        self.use = use
        self._detach = DetachKeys(keys)
        self._controls = controls
        self._interrupts = Interrupts(controls.interrupt)

    @property
    def waits(self) -> bool:
        """Whether the first of the detach keys has come, and the next not yet."""
        return self._detach.waits

    def press(self, piece: bytes, now: float) -> Pressed:
        """Return what `piece`, typed just now, asks for."""
        typed = self._detach.feed(piece)
        if self.use is Use.WRITE:
            insists = self._interrupts.typed(typed.passed, now) if typed.passed else False
            key = self._controls.interrupt
            interrupt = bool(key) and key in typed.passed
            return Pressed(typed.passed, interrupt=interrupt, cancel=insists, detach=typed.detach)
        return self._commands(typed.passed, typed.detach)

    def heard(self, piece: bytes) -> None:
        """Note what the job's terminal has shown."""
        self._interrupts.heard(piece)

    def _commands(self, keys: bytes, detach: bool) -> Pressed:
        commands = self._controls
        watches = self.use is Use.WATCH
        interrupts = keys.count(commands.interrupt) if commands.interrupt else 0
        quits = keys.count(commands.quit) if commands.quit else 0
        given = [signal.SIGINT] * min(interrupts, 2) + [signal.SIGQUIT] * min(quits, 1)
        return Pressed(
            signals=() if watches else tuple(given),
            suspend=bool(commands.suspend) and commands.suspend in keys,
            detach=detach or (watches and interrupts > 0),
        )
