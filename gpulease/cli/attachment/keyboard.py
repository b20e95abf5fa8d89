"""What keys mean while attached: input for the job, a request to cancel it, or to detach.

Pure: bytes and the time are arguments, and the result says what to pass on and what to do. The
notation of the detach keys is here too.
"""

from __future__ import annotations

import signal

from gpulease.errors import BadValue
from gpulease.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from enum import Enum
else:
    Enum = object  # `enum` takes a third of the interpreter's start to import

DEFAULT = r"ctrl-\ d"
NONE = "none"
_HINT = r"write them as ctrl-\,d or ctrl-p,ctrl-q; none turns them off"
_PASTE_BEGINS, _PASTE_ENDS = b"\x1b[200~", b"\x1b[201~"
"""What a terminal sends around a paste if the program has enabled that."""
_CONTROL = 0x40
"""The distance of a control character from the character that it is named after."""


def parse_keys(text: str) -> bytes:
    r"""Read what `--detach-keys` accepts: `ctrl-\,d` or `ctrl-p ctrl-q`; nothing for "none".

    Raises:
        BadValue: a key is invalid, or the first is one that people type as text.
    """
    if text.strip().lower() == NONE:
        return b""
    keys = bytes(_key(word, text) for word in text.replace(",", " ").split())
    if not keys:
        raise BadValue("cannot use the detach keys: no key is given", _HINT)
    if keys[0] >= ord(" "):
        raise BadValue(
            f"cannot use the detach keys {text!r}: the first key must be typed with ctrl, "
            "or each one typed in a text would be held back",
            _HINT,
        )
    return keys


def detach_sequence(option: str | None, environment: Mapping[str, str]) -> bytes:
    """Return the keys that detach: by the option, the environment, or the default.

    Raises:
        BadValue: they cannot be read.
    """
    return parse_keys(option or environment.get("GPULEASE_DETACH_KEYS") or DEFAULT)


def _key(word: str, text: str) -> int:
    name = word.lower()
    for prefix in ("ctrl-", "^"):
        letter = name.removeprefix(prefix).upper()
        if name.startswith(prefix) and len(letter) == 1 and "@" <= letter <= "_":
            return ord(letter) - _CONTROL
    if len(word) == 1 and "!" <= word <= "~":
        return ord(word)
    raise BadValue(f"cannot use the detach keys {text!r}: {word!r} is not a key", _HINT)


def name_of(keys: bytes) -> str:
    r"""Return the usual name of a sequence of keys, such as `Ctrl-\ d`."""
    return " ".join(
        chr(key) if key >= ord(" ") else f"Ctrl-{chr(key + _CONTROL).lower()}" for key in keys
    )


@record(frozen=True)
class Typed:
    """The result of a piece of typing."""

    passed: bytes
    detach: bool
    """The detach keys were typed; what follows is dropped."""


class DetachKeys:
    """Finds a sequence of keys in typed bytes, and passes on everything else.

    The first key typed twice is passed on once. In a paste the keys have no effect.
    """

    def __init__(self, keys: bytes) -> None:
        self._keys = keys
        self._held = b""
        self._recent = b""
        self._pasting = False

    @property
    def waits(self) -> bool:
        """Whether a key is held back until the next one is typed."""
        return bool(self._held)

    def feed(self, piece: bytes) -> Typed:
        """Take typed bytes."""
        passed = bytearray()
        for key in piece:
            passed += self._passed_by(bytes([key]))
            if self._keys and self._held == self._keys:
                self._held = b""
                return Typed(bytes(passed), detach=True)
        return Typed(bytes(passed), detach=False)

    def _passed_by(self, key: bytes) -> bytes:
        self._note_paste(key)
        if self._pasting:
            passed, self._held = self._held + key, b""
            return passed
        self._held += key
        passed = b""
        while self._held and not self._keys.startswith(self._held):
            if self._held == self._keys[:1] * 2:
                self._held = b""
                return passed + self._keys[:1]
            passed, self._held = passed + self._held[:1], self._held[1:]
        return passed

    def _note_paste(self, key: bytes) -> None:
        self._recent = (self._recent + key)[-len(_PASTE_BEGINS) :]
        if self._recent == _PASTE_BEGINS:
            self._pasting = True
        elif self._recent == _PASTE_ENDS:
            self._pasting = False


AGAIN_WITHIN = 1.0
"""Seconds between two Ctrl-C that cancel the job."""
_HEARD = 16


class Use(Enum):
    """What the keyboard does."""

    WRITE = "write"
    """Keys go to the job, except those that detach."""
    COMMAND = "command"
    """The job reads no keys. Keys that are signals in a terminal become signals for the job."""
    WATCH = "watch"
    """Nothing typed reaches the job."""


@record(frozen=True)
class Controls:
    """A terminal's characters for signals, each one byte, or empty if disabled."""

    interrupt: bytes = b"\x03"
    quit: bytes = b"\x1c"
    suspend: bytes = b"\x1a"


@record(frozen=True)
class Pressed:
    """What a piece of typing requests."""

    passed: bytes = b""
    """For the job's standard input."""
    signals: tuple[int, ...] = ()
    interrupt: bool = False
    """Ctrl-C is among the passed bytes."""
    cancel: bool = False
    suspend: bool = False
    """Stop this command only."""
    detach: bool = False


class Interrupts:
    """Distinguishes a Ctrl-C that should cancel the job from one that the job handles.

    A second Ctrl-C within a second cancels if the job's terminal has shown only the echo of the
    first. A program that reads keys itself echoes none, and one that handles the signal usually
    prints something.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._echo = b"^" + bytes(each ^ _CONTROL for each in key)
        self._at: float | None = None
        self._heard = b""

    def typed(self, piece: bytes, now: float) -> bool:
        """Return whether this piece should cancel the job; `now` is in seconds."""
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
    """Interprets the keys of one terminal for one job."""

    def __init__(self, keys: bytes, controls: Controls, use: Use) -> None:
        self.use = use
        self._detach = DetachKeys(keys)
        self._controls = controls
        self._interrupts = Interrupts(controls.interrupt)

    @property
    def waits(self) -> bool:
        """Whether the first detach key was typed, and the next was not yet."""
        return self._detach.waits

    def press(self, piece: bytes, now: float) -> Pressed:
        """Return what `piece`, typed at the time `now`, requests."""
        typed = self._detach.feed(piece)
        if self.use == Use.WRITE:
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
        watches = self.use == Use.WATCH
        interrupts = keys.count(commands.interrupt) if commands.interrupt else 0
        quits = keys.count(commands.quit) if commands.quit else 0
        given = [signal.SIGINT] * min(interrupts, 2) + [signal.SIGQUIT] * min(quits, 1)
        return Pressed(
            signals=() if watches else tuple(given),
            suspend=bool(commands.suspend) and commands.suspend in keys,
            detach=detach or (watches and interrupts > 0),
        )
