"""The keys that leave a job to itself: how they are written, and how they are told from others.

Pure: bytes go in as they were typed, and come out as they are to be passed on.
"""

from dataclasses import dataclass

from gpulease.errors import BadValue

DEFAULT = r"ctrl-\ d"
NONE = "none"
_HINT = r"write them as ctrl-\,d or ctrl-p,ctrl-q; none turns them off"
_PASTE_BEGINS, _PASTE_ENDS = b"\x1b[200~", b"\x1b[201~"
"""What a terminal sends around a paste, where the program that reads has asked for it."""
_CONTROL = 0x40
"""A control character is so far below the character that it is named after."""


def parse_keys(text: str) -> bytes:
    r"""Read what `--detach-keys` accepts: `ctrl-\,d` or `ctrl-p ctrl-q`; nothing for "none".

    Raises:
        BadValue: a key is not understood, or the first is one that people type.
    """
    if text.strip().lower() == NONE:
        return b""
    keys = bytes(_key(word, text) for word in text.replace(",", " ").split())
    if not keys:
        raise BadValue("cannot use the detach keys: none is named", _HINT)
    if keys[0] >= ord(" "):
        raise BadValue(
            f"cannot use the detach keys {text!r}: the first must be one with ctrl, "
            "or typing it would have to wait for the next",
            _HINT,
        )
    return keys


def _key(word: str, text: str) -> int:
    name = word.lower()
    for prefix in ("ctrl-", "^"):
        letter = name.removeprefix(prefix).upper()
        if name.startswith(prefix) and len(letter) == 1 and "@" <= letter <= "_":
            return ord(letter) - _CONTROL
    if len(word) == 1 and "!" <= word <= "~":
        return ord(word)
    raise BadValue(f"cannot use the detach keys {text!r}: {word!r} is no key", _HINT)


def name_of(keys: bytes) -> str:
    r"""Return what people call a sequence of keys, such as `Ctrl-\ d`."""
    return " ".join(
        chr(key) if key >= ord(" ") else f"Ctrl-{chr(key + _CONTROL).lower()}" for key in keys
    )


@dataclass(frozen=True, slots=True)
class Typed:
    """What came of a piece of typing."""

    passed: bytes
    detach: bool
    """The keys were typed; what came after them is dropped."""


class DetachKeys:
    """Find a sequence of keys in what is typed, and pass on all else.

    The first key twice is passed on once. Inside of a paste nothing is looked for.
    """

    def __init__(self, keys: bytes) -> None:
        self._keys = keys
        self._held = b""
        self._recent = b""
        self._pasting = False

    @property
    def waits(self) -> bool:
        """Whether a key is held back until the next one tells what it meant."""
        return bool(self._held)

    def feed(self, piece: bytes) -> Typed:
        """Take in what was typed."""
        passed = bytearray()
        for key in piece:
            passed += self._passed_by(bytes([key]))
            if self._keys and self._held == self._keys:
                self._held = b""
                return Typed(bytes(passed), detach=True)
        return Typed(bytes(passed), detach=False)

    def _passed_by(self, key: bytes) -> bytes:
        self._mind_pastes(key)
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

    def _mind_pastes(self, key: bytes) -> None:
        self._recent = (self._recent + key)[-len(_PASTE_BEGINS) :]
        if self._recent == _PASTE_BEGINS:
            self._pasting = True
        elif self._recent == _PASTE_ENDS:
            self._pasting = False
