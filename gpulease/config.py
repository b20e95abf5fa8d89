"""Settings of daemon and command, from a TOML file and the environment; read once, at the start.

The only reader of the process environment in the whole package: everything below is given values.
"""

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from gpulease.errors import BadConfiguration
from gpulease.setting_parsers import (
    every,
    one_of,
    read_amount,
    read_auto,
    read_count,
    read_grace,
    read_path,
    read_size,
    read_switch,
    read_toml,
    read_value,
    refuse_unknown,
)
from gpulease.units import GIB, MIB, Share, parse_memory, parse_span

SYSTEM_SOCKET = Path("/run/gpulease/gpuleased.sock")
SYSTEM_STATE = Path("/var/lib/gpulease")
SYSTEM_CONFIG = Path("/etc/gpulease/config.toml")
_A_QUARTER = Share(Fraction(25))
PERSONAL_LOG = "gpuleased.log"
"""In the state directory of a personal daemon; the system's writes to the journal."""


Exceptions = Mapping[str, Mapping[str, Any]]
"""By name of a user or a group: settings that are otherwise for it."""


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
    most_running_output: int | Share = _A_QUARTER
    """Bytes that are kept of all running jobs' output, or a share of the file system it is on."""
    keep_free: int = 256 * MIB
    """Bytes of that file system that the output of jobs leaves free; at most a tenth of it."""
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
    """How long the driver may take to answer one call before the GPU counts as unreadable."""
    health: str = "drain"
    """What is done about faults of a GPU's hardware: "drain" it, only "tell", or "off"."""
    health_quiet: timedelta = timedelta(minutes=10)
    """How long a GPU that was drained for a fault must be without one to be used again."""
    driver_limits: bool = True
    """Whether the driver is told to hold jobs to their leases, where it can."""
    admins: str = "gpulease"
    """The group whose members may act on everyone's jobs; it need not exist."""
    hide_commands: bool = False
    """Whether what others run is kept from who is neither root nor an admin."""
    leave_when_idle: timedelta | None = None
    """A personal daemon leaves after so long without a job or a caller."""
    overuse: str = "stop"
    """What becomes of a job that stays over its lease: "warn" it alone, or "stop" it."""
    overuse_tolerance: int = 256 * MIB
    """Bytes over the lease, on each GPU, that are let be."""
    overuse_grace: timedelta = timedelta(seconds=30)
    """How long a job may be over its lease by more than that."""
    elastic: bool = False
    """Whether a job may be over its lease while nobody waits for the memory."""
    idle: str = "off"
    """What becomes of a lease that is not used while others wait: "off", "warn" or "release"."""
    idle_after: timedelta = timedelta(minutes=30)
    """How long nothing may happen under a lease before that."""
    idle_grace: timedelta = timedelta(minutes=10)
    """Between telling the owner and the release."""
    users: Exceptions = field(default_factory=dict)
    """What is otherwise for users, by name."""
    groups: Exceptions = field(default_factory=dict)
    """What is otherwise for members of groups, by name; the first in the file counts."""


PER_USER = (
    "overuse",
    "overuse_tolerance",
    "overuse_grace",
    "elastic",
    "idle",
    "idle_after",
    "idle_grace",
)
"""What may be otherwise for a user or a group."""
_TABLES = frozenset({"users", "groups"})
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


_READERS: dict[str, Callable[[str], Any]] = {
    "socket": read_path,
    "state": read_path,
    "simulate": str,
    "margin": read_amount,
    "default_memory": parse_memory,
    "smallest_lease": read_size,
    "grace": parse_span,
    "log_limit": read_size,
    "keep_output_for": parse_span,
    "most_output": parse_memory,
    "most_running_output": parse_memory,
    "keep_free": read_amount,
    "keep_jobs_for": parse_span,
    "most_ended": read_count,
    "most_waiting": read_count,
    "most_waiting_bytes": read_size,
    "most_holds": read_count,
    "most_streams": read_count,
    "longest_grace": read_grace,
    "sample_every": parse_span,
    "driver_deadline": parse_span,
    "health": one_of("drain", "tell", "off"),
    "health_quiet": parse_span,
    "driver_limits": read_auto,
    "admins": str,
    "hide_commands": read_switch,
    "leave_when_idle": parse_span,
    "overuse": one_of("warn", "stop"),
    "overuse_tolerance": read_amount,
    "overuse_grace": read_grace,
    "elastic": read_switch,
    "idle": one_of("off", "warn", "release"),
    "idle_after": parse_span,
    "idle_grace": parse_span,
}


def environment() -> Mapping[str, str]:
    """Return the environment of this process."""
    return os.environ


def read_settings(
    path: Path | None,
    base: Settings,
    environment: Mapping[str, str] = os.environ,
    unnamed: Collection[str] = (),
) -> Settings:
    """Return `base` changed by the TOML file at `path` and by GPULEASE_* of the environment.

    Who wrote an unknown key is not told of the `unnamed` ones.

    Raises:
        BadConfiguration: the file cannot be read, or a key or a value of it is not understood.
    """
    written = read_toml(path) if path is not None else {}
    given = every(
        path, {key: partial(_value, path, unnamed, key, text) for key, text in written.items()}
    )
    for key, variable in (("socket", "GPULEASE_SOCKET"), ("simulate", "GPULEASE_SIMULATE")):
        if environment.get(variable):
            given[key] = _READERS[key](environment[variable])
    return replace(base, **given)


def _value(path: Path | None, unnamed: Collection[str], key: str, value: object) -> Any:
    known = [field.name for field in fields(Settings)]
    if key not in known:
        refuse_unknown(path, "it has", key, [each for each in known if each not in unnamed])
    if key in _TABLES:
        return _exceptions(path, key, value)
    return read_value(path, key, value, _READERS[key])


def _exceptions(path: Path | None, table: str, value: object) -> Exceptions:
    """Read a table such as [users.alice], with what is otherwise for whom it names.

    Raises:
        BadConfiguration: it is no table of tables, or a key or a value is not understood.
    """
    read: dict[str, Mapping[str, Any]] = {}
    for name, given in value.items() if isinstance(value, dict) else [("", value)]:
        if not isinstance(given, dict):
            raise BadConfiguration(
                f"cannot use the configuration {path}: {table} is a table of names",
                f'[{table}.NAME], and below it overuse = "warn"',
            )
        for key in given:
            refuse_unknown(path, f"[{table}.{name}] has", key, PER_USER)
        read[name] = {
            key: read_value(path, f"[{table}.{name}] {key}", each, _READERS[key])
            for key, each in given.items()
        }
    return read


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


def personal_config(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the settings of this user's own daemon, if there are any.

    Root reads root's alone: the environment may have come from somebody else, through su(1).
    """
    home = environment.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    file = Path(home) / "gpulease" / "config.toml"
    if not file.exists() or (os.geteuid() == 0 and file.stat().st_uid != 0):
        return None
    return file


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


DATABASE_NAME = "gpulease.db"
