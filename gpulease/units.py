"""Sizes and spans of time, read and written: "4G" and bytes, "2h" and seconds.

Sizes are binary, as nvidia-smi's are: 4G, 4GiB and 4096M are all 4 * 1024**3 bytes. A size may also
be a share of a GPU: "40%".
"""

from __future__ import annotations

from datetime import datetime, time, timedelta

from gpulease.errors import BadValue
from gpulease.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from fractions import Fraction

KIB, MIB, GIB, TIB = 1024, 1024**2, 1024**3, 1024**4

_UNIT_LETTERS = "KMGTIBkmgtib"
_FACTORS = {
    f"{unit}{end}": factor
    for unit, factor in (("", 1), ("K", KIB), ("M", MIB), ("G", GIB), ("T", TIB))
    for end in ("", "B", "I", "IB")
}
_MOST_DIGITS_LISTED = 4
"""Of the number of a GPU or a CPU; what is longer is none."""
_CLOCK = r"(?:(\d+)-)?(\d{1,3}):([0-5]\d)(?::([0-5]\d))?"
_LARGEST_SIZE = 1024 * TIB
LONGEST_SPAN = timedelta(days=3650)
_WITH_WEEKDAY = timedelta(days=6)
"""How near times are that have the day of the week."""
_SHOWN_LENGTH = 40
_LONGEST = 100
"""Characters of any value; Python refuses to convert numbers with thousands of digits."""
MOST_PARTS = 64
"""Logical GPUs on one GPU."""
_MOST_DIGITS = 4
_MOST_SECONDS = 9
"""Digits of a bare number."""
_MOST_LIKELY_HOURS = 72
"""A bare number up to here may be hours, the most usual unit of time limits."""
_MEBIBYTES_FROM = 300
"""A bare number from here on is more than the GiB of any GPU: Slurm's --mem counts in MiB."""
_SPLIT_HINT = "write a number of equal parts, or the size of each: --split 1G,2G"
_SIZE_HINT = "write a size as 4G, 4096M or 1.5G"
_MEMORY_HINT = f"{_SIZE_HINT}, or a share of a GPU as 40%"
_TIME_OF_DAY = r"(\d{1,2}):(\d\d)(?::(\d\d))?"
_ONE_DIGIT_HOUR = r"(?<=[ T])(?=\d:)"
_WEEKDAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_INSTANT_HINT = "write a point in time as 22:00, 'fri 18:00', '2026-12-04 18:00', +2h or now"
_SPAN_HINT = "write a time as 90s, 30m, 4h, 1d12h or 04:30:00"


@record(frozen=True)
class Share:
    """A part of the allocatable memory of a GPU; `percent` is above 0 and at most 100."""

    percent: Fraction

    def of(self, amount: int) -> int:
        """Return this part of `amount` bytes, rounded down to a whole MiB."""
        return int(amount * self.percent / 100) // MIB * MIB

    def __str__(self) -> str:
        return f"{float(self.percent):g}%"


def _shown(text: str) -> str:
    printable = "".join(char if char.isprintable() else "?" for char in text)
    return repr(printable[:_SHOWN_LENGTH] + ("..." if len(printable) > _SHOWN_LENGTH else ""))


def parse_size(text: str) -> int:
    """Read a size and return bytes.

    Raises:
        BadValue: `text` is no size, is not above zero, or is larger than any GPU.
    """
    return _parse_size(text, _SIZE_HINT)


def _parse_size(text: str, how: str) -> int:
    words = text.strip()
    number = words.rstrip(_UNIT_LETTERS)
    unit = words[len(number) :].upper()
    number = number.rstrip(" ")
    if len(text) > _LONGEST or not _is_number(number) or unit not in _FACTORS:
        raise BadValue(f"cannot read the size {_shown(text)}: it is not a size", how)
    whole, _, part = number.partition(".")
    # Exact, as a float is not. Rounded up, as `format_size` rounds down: 4.1G is shown as 4.1G.
    size = -int(-int(whole + part) * _FACTORS[unit] // 10 ** len(part))
    if words == number and int(whole + part) > 0:
        unit = "M" if int(whole[:_MOST_SECONDS]) >= _MEBIBYTES_FROM else "G"
        raise BadValue(
            f"cannot read the size {_shown(text)}: it has no unit", f"did you mean {number}{unit}?"
        )
    if size <= 0:
        raise BadValue(f"cannot lease {_shown(text)}: a size must be above zero", how)
    if size > _LARGEST_SIZE:
        raise BadValue(
            f"cannot lease {_shown(text)}: no GPU has that much memory",
            "gpulease status shows what the GPUs here offer",
        )
    return size


def parse_memory(text: str) -> int | Share:
    """Read what `--mem` accepts: a size in bytes, or a share of a GPU.

    Raises:
        BadValue: `text` is neither.
    """
    number = text.strip().removesuffix("%").rstrip(" ")
    if not text.strip().endswith("%") or len(text) > _LONGEST or not _is_number(number):
        return _parse_size(text, _MEMORY_HINT)
    from fractions import Fraction

    percent = Fraction(number)
    if not 0 < percent <= 100:
        raise BadValue(
            f"cannot lease {_shown(text)}: a share is above 0% and at most 100%",
            "for more than one GPU add --gpus 2" if percent else _MEMORY_HINT,
        )
    return Share(percent)


def parse_memory_range(text: str) -> tuple[int | Share, int | Share | None]:
    """Read what `--mem` accepts: a size or a share, or a range of them as 4G..10G.

    Returns the guarantee and the bound; the bound is None without a range.

    Raises:
        BadValue: `text` is none of them, or one end of the range is missing.
    """
    memory, dots, bound = text.partition("..")
    if not dots:
        return parse_memory(text), None
    if not (memory.strip() and bound.strip()):
        missing = "bound" if memory.strip() else "guarantee"
        raise BadValue(
            f"cannot read the range {_shown(text)}: its {missing} is missing",
            "write both, as 4G..10G: 4G are guaranteed, and up to 10G are used while no job waits",
        )
    return parse_memory(memory), parse_memory(bound)


def _is_number(text: str) -> bool:
    """Return whether a text is a decimal number such as 4 or 1.5."""
    whole, dot, part = text.partition(".")
    digits = whole + part if dot else whole
    return digits.isascii() and whole.isdecimal() and (part.isdecimal() or not dot)


def parse_split(text: str) -> tuple[int, list[int]]:
    """Read what `--split` accepts: a number of equal parts, or the size of each part: 1G,2G.

    Returns the number of parts, and their sizes in bytes, none for equal parts.

    Raises:
        BadValue: `text` is neither.
    """
    words = text.strip()
    if words.isascii() and words.isdecimal():
        if not 1 <= int(words[:_MOST_DIGITS]) <= MOST_PARTS:
            raise BadValue(
                f"cannot split a GPU into {_shown(words)} parts: 1 to {MOST_PARTS} are possible",
                _SPLIT_HINT,
            )
        return int(words), []
    sizes = [_parse_size(word, _SPLIT_HINT) for word in words.split(",", MOST_PARTS)]
    return len(sizes), sizes


def parse_span(text: str, *, may_be_zero: bool = False) -> timedelta:
    """Read a length of time as people type it: 90s, 30m, 4h, 1d12h, 04:30:00.

    A bare number and 1:30 are refused: Slurm reads them as minutes, and sleep(1) as seconds.

    Raises:
        BadValue: `text` is not a length of time, or is not above zero, unless it `may_be_zero`, or
            is over ten years.
    """
    words = text.strip()
    if words.isascii() and words.isdecimal() and words.strip("0"):
        number = words[:_SHOWN_LENGTH]
        hours = f"{number}h, " if int(number) <= _MOST_LIKELY_HOURS else ""
        raise BadValue(
            f"cannot read the time {_shown(words)}: it has no unit",
            f"did you mean {hours}{number}m, or {number}s?",
        )
    first, colon, second = words.partition(":")
    if colon and f"{first}{second}".isdecimal() and _read_span(words) is not None:
        raise BadValue(
            f"cannot read the time {_shown(words)}: it may be hours or minutes",
            f"did you mean {int(first)}h{second}m, or {int(first) * 60 + int(second)}s?",
        )
    return parse_setting_span(text, may_be_zero=may_be_zero)


def parse_setting_span(text: str, *, may_be_zero: bool = False) -> timedelta:
    """Read a length of time in a file of settings, where a bare number is seconds.

    Raises:
        BadValue: as `parse_span`.
    """
    span = _read_span(text.strip())
    if span is None:
        raise BadValue(f"cannot read the time {_shown(text)}: it is not a time", _SPAN_HINT)
    if span < timedelta(0) or (not span and not may_be_zero):
        raise BadValue(f"cannot use the time {_shown(text)}: it must be above zero", _SPAN_HINT)
    if span > LONGEST_SPAN:
        raise BadValue(f"cannot use the time {_shown(text)}: it is over ten years", _SPAN_HINT)
    return span


def parse_instant(text: str, now: datetime) -> datetime:
    """Read a point in time: 22:00, fri 18:00, tomorrow 8:00, 2026-12-04 18:00, +2h, now.

    Times of day are in the time zone of the process, and are the next ones after `now`.

    Raises:
        BadValue: `text` is not a point in time.
    """
    words = text.strip().lower()
    if words == "now":
        return now
    if words.startswith("+"):
        return now + parse_span(words[1:])
    try:
        return _read_instant(words[:_LONGEST], now)
    except (ValueError, OverflowError):
        raise BadValue(
            f"cannot read {_shown(text)}: it is not a point in time", _INSTANT_HINT
        ) from None


def next_time_of_day(clock: time, now: datetime, days: Sequence[int] = (0, 1)) -> datetime:
    """Return the first instant after `now` with a time of day, in the zone of this process.

    It is on one of some `days` from today on, and on the last of them if none is after `now`. A
    change to or from summer time in between counts.
    """
    today = now.astimezone().date()
    written = [
        datetime.combine(today + timedelta(days=each), clock.replace(fold=fold))
        for each in days
        for fold in (0, 1)  # at the end of summer time, an hour comes a second time
    ]
    # By timestamps: of a time that is skipped, astimezone() makes an earlier one.
    at = [datetime.fromtimestamp(each.timestamp()).astimezone() for each in written]
    return next((each for each in at if each > now), at[-1])


def _read_instant(words: str, now: datetime) -> datetime:
    """Raises: ValueError, OverflowError."""
    import re

    day, _, clock = words.rpartition(" ")
    if "-" in words:
        # fromisoformat wants two digits for the hour, and people write 9:00.
        return datetime.fromisoformat(re.sub(_ONE_DIGIT_HOUR, "0", words.upper())).astimezone()
    found_time = re.fullmatch(_TIME_OF_DAY, clock, re.ASCII)
    if found_time is None:
        raise ValueError("no time of day")
    hour, minute, second = (int(part or 0) for part in found_time.groups())
    today = now.astimezone().date()
    days: Sequence[int]
    if day in ("", "today"):
        days = (0,) if day else (0, 1)
    elif day == "tomorrow":
        days = (1,)
    else:
        ahead = (_WEEKDAYS.index(day[:3]) - today.weekday()) % 7
        days = (ahead, ahead + 7)
    return next_time_of_day(time(hour, minute, second), now, days)


def _read_span(text: str) -> timedelta | None:
    if len(text) > _SHOWN_LENGTH:
        return None
    if not text.isascii():
        return None
    if text.isdecimal():
        return timedelta(seconds=int(text)) if len(text) <= _MOST_SECONDS else None
    if (counts := _counts(text)) is not None:
        return _span(*counts)
    import re

    clock = re.fullmatch(_CLOCK, text, re.ASCII)
    return _span(*clock.groups()) if clock else None


def _counts(text: str) -> list[str | None] | None:
    """Return how many days, hours, minutes and seconds 1d12h has; None for another text."""
    counts, rest = list[str | None](), text.lower()
    for unit in "dhms":
        count, found, after = rest.partition(unit)
        is_there = bool(found) and count.isdecimal()
        counts.append(count if is_there else None)
        rest = after if is_there else rest
    return counts if text and not rest else None


def _span(
    days: str | None, hours: str | None, minutes: str | None, seconds: str | None
) -> timedelta:
    parts = [min(int(part or 0), 10**7) for part in (days, hours, minutes, seconds)]
    return timedelta(days=parts[0], hours=parts[1], minutes=parts[2], seconds=parts[3])


def numbers_in(text: str) -> list[int]:
    """Return the numbers in a text such as 0-3,7; what is none is left out."""
    found: list[int] = []
    for each in text.strip().split(","):
        first, dash, last = each.partition("-")
        ends = first, last if dash else first
        if all(end.isdecimal() and len(end) <= _MOST_DIGITS_LISTED for end in ends):
            found += range(int(ends[0]), int(ends[1]) + 1)
    return found


def counted(number: int, what: str) -> str:
    """Write a number of things: 1 job, 2 jobs."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def format_size(size: int) -> str:
    """Write bytes in the largest unit, with at most one decimal: 4G, 1.5G, 512M, 0.

    Sizes are rounded down, so that a job can ask for the size that is shown.
    """
    if size < 0:
        return "-" + format_size(-size)
    for unit, factor in (("T", TIB), ("G", GIB), ("M", MIB), ("K", KIB)):
        if size >= factor:
            tenths = size * 10 // factor
            whole, tenth = divmod(tenths, 10)
            return f"{whole}.{tenth}{unit}" if tenth else f"{whole}{unit}"
    return f"{size}B" if size else "0"


def round_up_size(size: int) -> int:
    """Return `size` rounded up to what people type: to 128M below 1G, 512M below 16G, else 1G.

    Every size that gpulease advises is one of these. `format_size` writes them without loss.
    """
    step = _step_of(size)
    return -(-size // step) * step


def round_down_size(size: int) -> int:
    """Return `size` rounded down to what people type; 0 below the smallest."""
    step = _step_of(size)
    return size // step * step


def _step_of(size: int) -> int:
    return 128 * MIB if size < GIB else 512 * MIB if size < 16 * GIB else GIB


def format_above(size: int, limit: int) -> str:
    """Write a size above `limit` so that it does not read as the limit: 1.1G, but 1030M for 1G."""
    shown = format_size(size)
    return f"{-(-size // MIB)}M" if size > limit and shown == format_size(limit) else shown


def format_instant(local: datetime, now: datetime, *, seconds: bool = False) -> str:
    """Write an instant, in the time zone that it has, with the day if that is not the day of `now`.

    The day of another week is a date.
    """
    # A format such as %H:%M takes several times as long.
    text = local.isoformat(" ")
    clock = text[11 : 19 if seconds else 16]
    if local.toordinal() == now.toordinal():
        return clock
    return f"{local:%a} {clock}" if abs(local - now) < _WITH_WEEKDAY else f"{text[:10]} {clock}"


def format_span(span: timedelta) -> str:
    """Write a length of time by its two largest units: 3s, 2m 5s, 1h 30m, 2d 4h."""
    seconds = max(0, int(span.total_seconds()))
    parts = []
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, seconds = divmod(seconds, length)
        if count:
            parts.append(f"{count}{unit}")
    return " ".join(parts[:2]) or "0s"
