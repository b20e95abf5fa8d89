"""Settings of the daemon and its commands, from a TOML file and the environment.

This is the only reader of the process environment: other modules are given values.
"""

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from gpulease import locations
from gpulease.setting_parsers import (
    Mistakes,
    limit_of,
    one_of,
    parse_address,
    parse_amount,
    parse_auto,
    parse_count,
    parse_factor,
    parse_grace,
    parse_names,
    parse_path,
    parse_reserve,
    parse_switch,
    read_toml,
)
from gpulease.units import GIB, MIB, Share, parse_memory, parse_setting_span, parse_size

SYSTEM_SOCKET = Path(locations.SYSTEM_SOCKET)
SYSTEM_STATE = Path("/var/lib/gpulease")
SYSTEM_CONFIG = Path(locations.SYSTEM_CONFIG)
DATABASE_NAME = "gpulease.db"
PERSONAL_LOG = "gpuleased.log"
"""In the state directory of a personal daemon; the system's daemon logs to the journal."""
_A_QUARTER = Share(Fraction(25))

# Each type of a setting, with the parser of its text. Sizes are in bytes.
Amount = Annotated[int, parse_amount]
Size = Annotated[int, parse_size]
Memory = Annotated[int | Share, parse_memory]
Count = Annotated[int, parse_count]
Span = Annotated[timedelta, parse_setting_span]
Grace = Annotated[timedelta, parse_grace]
Switch = Annotated[bool, parse_switch]
MostCount = Annotated[int | None, limit_of(parse_count)]
MostMemory = Annotated[int | None, limit_of(parse_size)]
MostTime = Annotated[timedelta | None, limit_of(parse_setting_span)]
Exceptions = Mapping[str, Mapping[str, Any]]
"""By name of a user or a group: settings that replace the general ones."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The daemon's settings; each name is a key of the TOML file."""

    socket: Annotated[Path, parse_path] = SYSTEM_SOCKET
    state: Annotated[Path, parse_path] = SYSTEM_STATE
    simulate: Annotated[str | None, str] = None
    """GPUs to simulate, such as "2x24G"; None uses the real ones."""
    margin: Amount = 0
    """Memory of each GPU that is never leased."""
    default_memory: Memory = 4 * GIB
    """The lease of a job that names no size."""
    smallest_lease: Size = 300 * MIB
    """Less than this cannot hold a CUDA context."""
    grace: Span = timedelta(seconds=60)
    """Time between SIGTERM and SIGKILL."""
    log_limit: Size = 256 * MIB
    """Output that is kept of each stream of a job; the oldest is removed first."""
    keep_output_for: Span = timedelta(days=30)
    """How long the output of an ended job is kept."""
    most_output: Memory = _A_QUARTER
    """Output that is kept of all ended jobs, or a share of its file system."""
    most_running_output: Memory = _A_QUARTER
    """Output that is kept of all running jobs, or a share of its file system."""
    keep_free: Amount = 256 * MIB
    """Space on that file system that output leaves free; at most a tenth of it."""
    keep_jobs_for: Span = timedelta(days=365)
    """How long the record of an ended job is kept."""
    most_ended: Count = 100_000
    """Ended jobs of one user on record."""
    most_waiting: Count = 10_000
    """Queued jobs and leases of one user."""
    most_gpus: MostCount = None
    """GPUs of all running jobs and holds of one user; None is no limit, here and below."""
    most_memory: MostMemory = None
    """Memory of all their leases."""
    most_running: MostCount = None
    """Jobs and holds of one user that hold memory."""
    most_ram: MostMemory = None
    """RAM that they lease with --ram."""
    most_cpus: MostCount = None
    """Cores that they lease with --cpus."""
    gib_hours_per_week: MostCount = None
    """GiB times hours that one user may lease in 7 days."""
    longest_time: MostTime = None
    """The longest time limit of a job or a hold."""
    default_time: MostTime = None
    """The time limit of a job that names none."""
    most_hold_time: MostTime = None
    """The longest time limit of a hold."""
    over_limit: Annotated[str, one_of("wait", "refuse")] = "wait"
    """What happens to a job that would put its user over a limit: "wait" or "refuse"."""
    most_waiting_bytes: Size = 256 * MIB
    """Size of the arguments and environments of one user's queued jobs in the database."""
    most_holds: Count = 100
    """Leases without a job of one user, queued or held."""
    most_streams: Count = 900
    """Streams (watch, logs --follow) of one user at once; a few connections are always left."""
    longest_grace: Grace = timedelta(hours=1)
    """The longest grace that a job may ask for."""
    sample_every: Span = timedelta(seconds=1)
    driver_deadline: Span = timedelta(seconds=3)
    """Time for one call of the driver, after which a GPU counts as unreadable."""
    health: Annotated[str, one_of("drain", "tell", "off")] = "drain"
    """The reaction to hardware faults of a GPU: "drain" it, only "tell", or "off"."""
    health_quiet: Span = timedelta(minutes=10)
    """Time without a fault after which a GPU that was drained for one is used again."""
    driver_limits: Annotated[bool, parse_auto] = True
    """Whether the driver enforces leases, where it can."""
    admins: Annotated[str, str] = "gpulease"
    """The group whose members may act on all jobs; it need not exist."""
    hide_commands: Switch = False
    """Whether users who are neither root nor admins see only their own commands."""
    leave_when_idle: Annotated[timedelta | None, parse_setting_span] = None
    """Time without a job or a caller after which a personal daemon exits."""
    overuse: Annotated[str, one_of("warn", "stop")] = "stop"
    """The reaction to a job that stays over its lease: "warn" its owner, or "stop" it."""
    overuse_tolerance: Amount = 256 * MIB
    """Memory over the lease, on each GPU, that is tolerated."""
    overuse_grace: Grace = timedelta(seconds=30)
    """How long a job may exceed its lease by more than that."""
    elastic: Switch = False
    """Whether a job may exceed its lease while no other job waits for the memory."""
    idle: Annotated[str, one_of("off", "warn", "release")] = "warn"
    """The reaction to a lease that is not used while others wait: "off", "warn" or "release"."""
    idle_after: Span = timedelta(hours=1)
    """How long a lease must be unused before that."""
    idle_grace: Span = timedelta(minutes=10)
    """Time between the notice to the owner and the release."""
    cluster: Annotated[str, one_of("none", "slurm")] = "none"
    """Who places jobs on machines: "slurm", or "none" for this machine alone (docs/cluster.md)."""
    slurm: Mapping[str, Any] = field(default_factory=dict)
    """The settings under Slurm that differ from the defaults, by the keys of SLURM_KEYS."""
    host: Mapping[str, Any] = field(default_factory=dict)
    """The settings about RAM and cores that differ from the defaults, by the keys of HOST_KEYS."""
    queue: Mapping[str, Any] = field(default_factory=dict)
    """The settings of the queue that differ from the defaults, by the keys of QUEUE_KEYS."""
    notify: Mapping[str, Any] = field(default_factory=dict)
    """The settings of notifications, by the keys of NOTIFY_KEYS."""
    web: Mapping[str, Any] = field(default_factory=dict)
    """What the daemon has to know of the web page, by the keys of WEB_KEYS."""
    users: Exceptions = field(default_factory=dict)
    """Settings of single users, by name."""
    groups: Exceptions = field(default_factory=dict)
    """Settings of the members of groups, by name; the first table in the file wins. `TOGETHER` is
    for all members of a group together."""


@dataclass(frozen=True, slots=True)
class SlurmSettings:
    """The table [slurm]; `Settings.slurm` has what differs from the defaults."""

    shard: int = 256 * MIB
    """Bytes of one shard, the unit in which Slurm counts memory of GPUs."""
    node: str = ""
    """The name of this node in slurm.conf; empty: the host name up to its first dot."""
    local_gpus: tuple[str, ...] = ()
    """GPUs, by index or UUID, that Slurm does not know: they belong to the local queue."""
    publish_every: timedelta = timedelta(seconds=15)
    """How often the daemon publishes its GPUs through Slurm, if they have changed."""

    @property
    def node_name(self) -> str:
        """The name of this machine in Slurm, if it is a node."""
        return self.node or os.uname().nodename.partition(".")[0]


PER_USER = (
    "overuse",
    "overuse_tolerance",
    "overuse_grace",
    "elastic",
    "idle",
    "idle_after",
    "idle_grace",
    "most_gpus",
    "most_memory",
    "most_running",
    "most_ram",
    "most_cpus",
    "most_waiting",
    "gib_hours_per_week",
    "longest_time",
    "default_time",
    "most_hold_time",
    "over_limit",
)
"""The keys of [users.NAME] and [groups.NAME]."""
TOGETHER = "together"
"""The table [groups.NAME.together]: limits of all members of a group together."""
_TOGETHER_KEYS = ("most_gpus", "most_memory", "most_ram", "most_cpus", "gib_hours_per_week")
QUEUE_KEYS: Mapping[str, Callable[[str], Any]] = {
    "policy": one_of("fair", "easy", "fifo"),
    "aging_jobs": parse_count,
    "run_time_samples": parse_count,
    "reservation_slowdown": parse_factor,
    "soft_reservation_after": parse_setting_span,
    "backfill_factor": parse_factor,
    "hard_reservation_after": parse_setting_span,
    "hard_reservation_waits": parse_factor,
    "unlimited_run_time": parse_setting_span,
    "most_utilization": parse_factor,
    "settling_time": parse_setting_span,
    "most_sharing": parse_count,
    "preemption_grace": parse_grace,
}
"""The keys of [queue], which `domain.queue_options` explains, and the parsers of their values."""
HOST_KEYS: Mapping[str, Callable[[str], Any]] = {
    "reserved_ram": parse_reserve,
    "reserved_cpus": parse_count,
}
"""The keys of [host], which `domain.host_memory.HostPolicy` explains."""
FORMER_QUEUE_KEYS = frozenset(
    {
        "age_offset",
        "assumed_utilization",
        "default_run_time",
        "shortest_run_time",
        "smallest_share",
        "use_half_life",
    }
)
"""Keys of [queue] in development versions, for numbers that are constants now. They are accepted,
with a warning, so that a daemon starts after an upgrade."""
SLURM_KEYS: Mapping[str, Callable[[str], Any]] = {
    "shard": parse_size,
    "node": str,
    "local_gpus": parse_names,
    "publish_every": parse_setting_span,
}
"""The keys of [slurm], and the parsers of their values; the defaults are in `SlurmSettings`."""
RUN_TABLE = "run"
"""In a user's file: defaults for the options of `gpulease run`, see cli/run_defaults.py."""
NOTIFY_TABLE = "notify"
"""In a user's file: their receivers of notifications, see notify/settings.py. Not read here."""
NOTIFY_KEYS: Mapping[str, Callable[[str], Any]] = {
    "admins": parse_names,
    "weekly_report": one_of("none", "mon", "tue", "wed", "thu", "fri", "sat", "sun"),
}
"""The keys of [notify] in the file of a machine's daemon, and the parsers of their values."""
WEB_KEYS: Mapping[str, Callable[[str], Any]] = {"address": parse_address}
"""The keys of [web], and the parsers of their values."""
_KEYS_OF: Mapping[str, tuple[Mapping[str, Callable[[str], Any]], str]] = {
    "host": (HOST_KEYS, 'reserved_ram = "16G"'),
    "queue": (QUEUE_KEYS, 'policy = "fair"'),
    "slurm": (SLURM_KEYS, 'shard = "256M"'),
    "notify": (NOTIFY_KEYS, 'admins = ["alice"]'),
    "web": (WEB_KEYS, 'address = "https://gpu01.example.org/gpulease"'),
}
"""The keys of each table, with an example."""
_TABLES = (*_KEYS_OF, "users", "groups")
ONLY_AT_START = frozenset({"socket", "state", "simulate", "driver_deadline", "leave_when_idle"})
"""The settings that need a restart; a running daemon can change the others."""


def environment() -> Mapping[str, str]:
    """Return the environment of this process."""
    return locations.environment()


def renew(current: Settings, fresh: Settings) -> tuple[Settings, list[str], list[str]]:
    """Return `current` with the changes of `fresh`, their names, and those that need a restart."""
    changed = [
        field.name
        for field in fields(Settings)
        if getattr(current, field.name) != getattr(fresh, field.name)
    ]
    taken = [name for name in changed if name not in ONLY_AT_START]
    renewed = replace(current, **{name: getattr(fresh, name) for name in taken})
    return renewed, taken, [name for name in changed if name in ONLY_AT_START]


def read_settings(
    path: Path | None,
    base: Settings,
    environment: Mapping[str, str] = os.environ,
    unnamed: Collection[str] = (),
    *,
    is_users: bool = False,
) -> Settings:
    """Return `base` changed by the TOML file at `path` and by GPULEASE_* of the environment.

    Suggestions for unknown keys leave out the `unnamed` ones. A file that `is_users` may also have
    a table for `gpulease run`, which is not read here.

    Raises:
        BadConfiguration: the file cannot be read, or has mistakes. Names all of them.
    """
    parsers = _parsers()
    known = [name for name in (*parsers, *_TABLES) if name not in unnamed]
    mistakes = Mistakes(path)
    given: dict[str, Any] = {}
    for key, value in _content(path, mistakes, is_users=is_users).items():
        if key in _KEYS_OF:
            keys, example = _KEYS_OF[key]
            if isinstance(value, dict):
                former = FORMER_QUEUE_KEYS if key == "queue" else frozenset()
                given[key] = _table(mistakes, key, value, keys, former)
            else:
                mistakes.not_a_table(key, f"[{key}], and below it {example}")
        elif key in _TABLES:
            given[key] = _exceptions(mistakes, key, value, parsers)
        elif key in parsers:
            given[key] = mistakes.parse(key, value, parsers[key])
        else:
            mistakes.unknown("it has", key, known)
    mistakes.raise_if_any()
    for key, variable in (("socket", "GPULEASE_SOCKET"), ("simulate", "GPULEASE_SIMULATE")):
        if environment.get(variable):
            given[key] = parsers[key](environment[variable])
    return replace(base, **given)


def _content(path: Path | None, mistakes: Mistakes, *, is_users: bool) -> Mapping[str, Any]:
    content = {} if path is None else read_toml(path)
    if content.pop(RUN_TABLE, None) is not None and not is_users:
        mistakes.misplaced(RUN_TABLE, "it belongs in ~/.config/gpulease/config.toml of a user")
    if is_users:
        content.pop(NOTIFY_TABLE, None)
    return content


def _parsers() -> Mapping[str, Callable[[str], Any]]:
    """Return the parser of each key, from the annotations of `Settings`."""
    hints = get_type_hints(Settings, include_extras=True)
    return {key: hint.__metadata__[0] for key, hint in hints.items() if key not in _TABLES}


def _exceptions(
    mistakes: Mistakes, table: str, value: object, parsers: Mapping[str, Callable[[str], Any]]
) -> Exceptions:
    """Parse the tables [users.NAME] or [groups.NAME]."""
    per_user = {key: parsers[key] for key in PER_USER}
    read: dict[str, Mapping[str, Any]] = {}
    for name, given in value.items() if isinstance(value, dict) else [("", value)]:
        if not isinstance(given, dict):
            mistakes.not_a_table(f"{table}", f'[{table}.NAME], and below it overuse = "warn"')
            break
        rest = dict(given)
        together = rest.pop(TOGETHER, None) if table == "groups" else None
        read[name] = _table(mistakes, f"{table}.{name}", rest, per_user)
        where = f"{table}.{name}.{TOGETHER}"
        if isinstance(together, dict):
            limits = _table(
                mistakes, where, together, {key: parsers[key] for key in _TOGETHER_KEYS}
            )
            read[name] = {**read[name], TOGETHER: limits}
        elif together is not None:
            mistakes.not_a_table(where, f"[{where}], and below it most_gpus = 8")
    return read


def _table(
    mistakes: Mistakes,
    name: str,
    given: Mapping[str, object],
    parsers: Mapping[str, Callable[[str], Any]],
    former: Collection[str] = (),
) -> Mapping[str, Any]:
    """Parse a table of settings, such as [queue]; the values of `former` keys do not matter."""
    for key in given.keys() - parsers.keys():
        if key not in former:
            mistakes.unknown(f"[{name}] has", key, list(parsers))
    return {
        key: mistakes.parse(f"[{name}] {key}", each, parsers[key]) if key in parsers else None
        for key, each in given.items()
        if key in parsers or key in former
    }


def runtime_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the directory of this user's short-lived files: XDG_RUNTIME_DIR, or one in /tmp."""
    return Path(locations.runtime_directory(environment))


def personal_socket(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the socket of this user's personal daemon."""
    return runtime_directory(environment) / "gpuleased.sock"


def personal_settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """Return the default settings of a personal daemon."""
    return Settings(
        socket=personal_socket(environment),
        state=personal_state(environment),
        leave_when_idle=timedelta(minutes=10),
    )


def personal_config(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the settings file of this user's personal daemon, if there is one."""
    found = locations.personal_config(environment)
    return None if found is None else Path(found)


def personal_state(environment: Mapping[str, str] = os.environ, host: str | None = None) -> Path:
    """Return the state directory of this user's personal daemon, one for each host.

    Several machines may share a home, each with its GPUs, jobs and daemon. A database in the parent
    directory, from a version without a directory for each host, stays in use.
    """
    home = environment.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    folder = Path(home) / "gpulease"
    if (folder / "gpulease.db").exists():
        return folder
    return folder / ((host or os.uname().nodename).replace("/", "_") or "localhost")


def candidate_sockets(
    given: Path | None, environment: Mapping[str, str] = os.environ
) -> tuple[Path, ...]:
    """Return the sockets to try, in order.

    A socket that the user names (`given`, or GPULEASE_SOCKET) is the only one.
    """
    named = given or (
        Path(environment["GPULEASE_SOCKET"]) if environment.get("GPULEASE_SOCKET") else None
    )
    return (named,) if named is not None else (SYSTEM_SOCKET, personal_socket(environment))
