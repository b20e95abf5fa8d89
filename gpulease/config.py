"""Settings of daemon and command, from a TOML file and the environment; read once, at the start.

The only reader of the process environment in the whole package: everything below is given values.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

from gpulease.errors import BadConfiguration, BadValue, GpuleaseError
from gpulease.units import GIB, MIB, Share, parse_memory, parse_size, parse_span

SYSTEM_SOCKET = Path("/run/gpulease/gpuleased.sock")
SYSTEM_STATE = Path("/var/lib/gpulease")
SYSTEM_CONFIG = Path("/etc/gpulease/config.toml")
LONGEST_GRACE = timedelta(days=1)
_LARGEST_COUNT = 1_000_000
_A_QUARTER = Share(Fraction(25))
PERSONAL_LOG = "gpuleased.log"
"""In the state directory of a personal daemon; the system's writes to the journal."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the daemon runs with; each name is a key of the TOML file."""

    socket: Path = SYSTEM_SOCKET
    state: Path = SYSTEM_STATE
    simulate: str | None = None
    """GPUs to simulate, such as "2x24G"; None reads the real ones."""
    margin: int = 0
    """Bytes of each GPU that are never leased."""
    default_memory: int | Share = 4 * GIB
    """What a job gets that does not say."""
    smallest_lease: int = 300 * MIB
    """Bytes; less holds no CUDA context."""
    grace: timedelta = timedelta(seconds=60)
    """Between asking a worker to go and making it go."""
    log_limit: int = 256 * MIB
    """Bytes that are kept of each stream of a job's output; the oldest goes first."""
    keep_output_for: timedelta = timedelta(days=30)
    """How long the output of a job is kept after its end."""
    most_output: int | Share = _A_QUARTER
    """Bytes that are kept of all ended jobs' output, or a share of the file system it is on."""
    keep_jobs_for: timedelta = timedelta(days=365)
    """How long the record of a job is kept after its end."""
    most_ended: int = 100_000
    """Ended jobs of one user that are kept on record."""
    most_waiting: int = 10_000
    """Jobs and leases of one user that wait."""
    most_waiting_bytes: int = 256 * MIB
    """What the arguments and environments of one user's waiting jobs take in the database."""
    most_holds: int = 100
    """Leases without a job of one user, waiting or held."""
    most_streams: int = 900
    """Streams (watch, logs --follow) of one user at once; a few connections are always left."""
    longest_grace: timedelta = timedelta(hours=1)
    """What a job may ask for as its own grace."""
    sample_every: timedelta = timedelta(seconds=1)
    driver_deadline: timedelta = timedelta(seconds=3)
    """How long the driver may take to answer before its GPU counts as unreadable."""
    health: str = "drain"
    """What is done about faults of a GPU's hardware: "drain" it, only "tell", or "off"."""
    health_quiet: timedelta = timedelta(minutes=10)
    """How long a GPU that was drained for a fault must be without one to be used again."""
    admins: str = "gpulease"
    """The group whose members may act on everyone's jobs; it need not exist."""
    hide_commands: bool = False
    """Whether what others run is kept from who is neither root nor an admin."""
    leave_when_idle: timedelta | None = None
    """A personal daemon leaves after so long without a job or a caller."""


ONLY_AT_START = frozenset({"socket", "state", "simulate", "driver_deadline", "leave_when_idle"})
"""What a running daemon holds on to; the other settings can be changed under it."""


def renew(current: Settings, fresh: Settings) -> tuple[Settings, list[str], list[str]]:
    """Return `current` with what of `fresh` can be taken over, what that is, and what cannot be."""
    changed = [
        field.name
        for field in fields(Settings)
        if getattr(current, field.name) != getattr(fresh, field.name)
    ]
    taken = [name for name in changed if name not in ONLY_AT_START]
    renewed = replace(current, **{name: getattr(fresh, name) for name in taken})
    return renewed, taken, [name for name in changed if name in ONLY_AT_START]


def _parse_switch(text: str) -> bool:
    try:
        return {"true": True, "false": False}[text.lower()]
    except KeyError:
        raise BadValue(f"{text!r} is neither true nor false", None) from None


def _read_count(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or not 0 < int(text) <= _LARGEST_COUNT:
        raise BadValue(
            f"cannot read {text[:40]!r}: it is not a number from 1 to {_LARGEST_COUNT}",
            "write it in digits, without a unit",
        )
    return int(text)


def _read_grace(text: str) -> timedelta:
    span = parse_span(text)
    if span > LONGEST_GRACE:
        raise BadValue(f"cannot use the grace {text}: it is over a day", "5m, 1h, 1d")
    return span


def _read_health(text: str) -> str:
    if text not in ("drain", "tell", "off"):
        raise BadValue(f"{text[:40]!r} is not one of drain, tell, off", None)
    return text


def _path(text: str) -> Path:
    if not text or "\0" in text:
        raise BadConfiguration(f"cannot use the path {text[:40]!r}: no file can be called that")
    return Path(text)


_READERS: dict[str, Callable[[str], Any]] = {
    "socket": _path,
    "state": _path,
    "simulate": str,
    "margin": lambda text: 0 if text == "0" else parse_size(text),
    "default_memory": parse_memory,
    "smallest_lease": parse_size,
    "grace": parse_span,
    "log_limit": parse_size,
    "keep_output_for": parse_span,
    "most_output": parse_memory,
    "keep_jobs_for": parse_span,
    "most_ended": _read_count,
    "most_waiting": _read_count,
    "most_waiting_bytes": parse_size,
    "most_holds": _read_count,
    "most_streams": _read_count,
    "longest_grace": _read_grace,
    "sample_every": parse_span,
    "driver_deadline": parse_span,
    "health": _read_health,
    "health_quiet": parse_span,
    "admins": str,
    "hide_commands": _parse_switch,
    "leave_when_idle": parse_span,
}


def environment() -> Mapping[str, str]:
    """Return the environment of this process."""
    return os.environ


def read_settings(
    path: Path | None, base: Settings, environment: Mapping[str, str] = os.environ
) -> Settings:
    """Return `base` changed by the TOML file at `path` and by GPULEASE_* of the environment.

    Raises:
        BadConfiguration: the file cannot be read, or a key or a value of it is not understood.
    """
    written = _read_toml(path) if path is not None else {}
    given = {key: _value(path, key, text) for key, text in written.items()}
    for key, variable in (("socket", "GPULEASE_SOCKET"), ("simulate", "GPULEASE_SIMULATE")):
        if environment.get(variable):
            given[key] = _READERS[key](environment[variable])
    return replace(base, **given)


def _read_toml(path: Path) -> dict[str, Any]:
    # Only the daemon reads a file; the command, which starts often, does without.
    import tomllib

    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadConfiguration(
            f"cannot read the configuration {path}: there is no such file",
            "leave out --config to run with the defaults",
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadConfiguration(f"cannot read the configuration {path}: {error}") from error


def _value(path: Path | None, key: str, value: object) -> Any:
    known = [field.name for field in fields(Settings)]
    if key not in known:
        raise BadConfiguration(
            f"cannot use the configuration {path}: it has an unknown key {key!r}",
            f"known keys: {', '.join(known)}",
        )
    if not isinstance(value, str | int):
        raise BadConfiguration(f'cannot use the configuration {path}: write {key} = "..."')
    try:
        return _READERS[key](str(value))
    except GpuleaseError as error:
        raise BadConfiguration(
            f"cannot use the configuration {path}: {key}: {error.message}", error.hint
        ) from error


def runtime_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Return where this user's short-lived files belong: XDG_RUNTIME_DIR, or a folder in /tmp.

    The former only if it is theirs: to root it may have come from somebody else, through su(1).
    """
    given = environment.get("XDG_RUNTIME_DIR")
    if given and Path(given).is_dir() and Path(given).stat().st_uid == os.geteuid():
        return Path(given) / "gpulease"
    return Path(f"/tmp/gpulease-{os.geteuid()}")  # noqa: S108  the daemon checks whose it is


def personal_socket(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the socket of this user's own daemon."""
    return runtime_directory(environment) / "gpuleased.sock"


def personal_settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings of a daemon that one user runs for themselves."""
    return Settings(
        socket=personal_socket(environment),
        state=personal_state(environment),
        leave_when_idle=timedelta(minutes=10),
    )


def personal_state(environment: Mapping[str, str] = os.environ, host: str | None = None) -> Path:
    """Return where this user's own daemon keeps its record: a folder for each host.

    A home may be shared by many machines, each with GPUs, jobs and a daemon of its own. A record
    from before there was a folder for each stays in use where it is.
    """
    home = environment.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    folder = Path(home) / "gpulease"
    if (folder / "gpulease.db").exists():
        return folder
    return folder / ((host or os.uname().nodename).replace("/", "_") or "localhost")


def candidate_sockets(
    given: Path | None, environment: Mapping[str, str] = os.environ
) -> tuple[Path, ...]:
    """Return where a daemon may listen, first choice first.

    One that was named (`given`, or GPULEASE_SOCKET) is the only choice.
    """
    named = given or (
        Path(environment["GPULEASE_SOCKET"]) if environment.get("GPULEASE_SOCKET") else None
    )
    return (named,) if named is not None else (SYSTEM_SOCKET, personal_socket(environment))
