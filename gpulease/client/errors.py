"""The errors of the connection to a daemon, with hints that fit the kind of daemon."""

import os
import pwd
from pathlib import Path

from gpulease import config, errors, light_json
from gpulease.client.unix_socket import trusted_users
from gpulease.errors import AnswerLost, GpuleaseError, NoDaemon, NotTrusted
from gpulease.options import option_of

StrPath = Path | str
_NO_DAEMON_HINT = (
    "one that you started yourself may be starting still, or has ended after ten idle minutes; "
    "otherwise ask an admin to start gpuleased, or use another socket with --socket"
)


def error_of(status: int, body: bytes, path: StrPath) -> GpuleaseError:
    """Return the error that the daemon has replied with, as the class that it was there."""
    try:
        error = light_json.decode(body).error
        code, message, hint = str(error.code), str(error.message), error.hint
    except (ValueError, AttributeError):
        return GpuleaseError(
            f"cannot get an answer: the daemon replied with HTTP {status}",
            _see_log(path),
        )
    kind = errors.BY_CODE.get(code, GpuleaseError)
    hint = None if hint is None else str(hint)
    if getattr(error, "field", None) is None:
        return kind(message, hint)
    field = str(error.field)
    return kind.of_field(field, error.value, str(error.reason), hint).called(option_of(field))


def no_daemon(path: StrPath, error: Exception) -> NoDaemon:
    """Return why no daemon can be reached at `path`."""
    path = Path(path)
    shown = os.fsencode(path).decode(errors="replace")
    start = _personal_hint() if path == config.personal_socket() else _NO_DAEMON_HINT
    if path.is_dir():
        hint = f"name a socket: --socket {shown}/gpuleased.sock"
        return NoDaemon(f"cannot reach the daemon: {shown} is a directory", hint)
    if isinstance(error, PermissionError | ConnectionRefusedError):
        owner = _owner(path)
        if owner is not None and owner not in trusted_users():
            return not_trusted(path, owner)
    match error:
        case FileNotFoundError() | NotADirectoryError():
            why, hint = f"no socket {shown}", start
        case ConnectionRefusedError():
            why, hint = f"nothing listens on {shown}", start
        case PermissionError():
            why = f"no permission to open the socket {shown}"
            hint = "the socket of a shared daemon is open to every user: gpulease doctor, as root"
        case TimeoutError() | BlockingIOError():
            why = f"it does not answer on {shown}"
            hint = f"it may be stopped or busy; {_see_log(path)}"
        case _:
            why, hint = f"{shown}: {error}", start
    return NoDaemon(f"cannot reach the daemon: {why}", hint)


def _owner(path: Path) -> int | None:
    try:
        return path.lstat().st_uid
    except OSError:
        return None


def not_trusted(path: StrPath, uid: int) -> NotTrusted:
    """Return the error for a socket on which neither root nor the caller listens."""
    path = Path(path)
    if path == config.personal_socket():
        hint = (
            f"ask an admin to remove {path.parent}; until then use another directory for your "
            'daemon: export XDG_RUNTIME_DIR="$(mktemp -d)"'
        )
    elif path == config.SYSTEM_SOCKET:
        hint = "tell an admin: only a daemon of root may listen there"
    else:
        hint = (
            "without GPULEASE_SOCKET and --socket, gpulease uses the machine's daemon or starts "
            "one for you"
        )
    return NotTrusted(
        f"cannot trust the daemon on {path}: it belongs to {_name(uid)}, not to root or you, "
        "and would see the environment of your jobs",
        hint,
    )


def _name(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"user {uid}"


def answer_lost(path: StrPath, error: Exception) -> AnswerLost:
    """Return the error for a request that was sent and not answered."""
    reason = no_daemon(path, error)
    return AnswerLost(reason.message, reason.hint)


def lost(path: StrPath) -> AnswerLost:
    """Return the error for an answer that ended too early."""
    return AnswerLost(
        f"lost connection to the daemon on {path}",
        f"jobs continue without it; give the command again; {_see_log(path)}",
    )


def unreadable(why: str) -> GpuleaseError:
    """Return the error for a reply that is not what this version expects."""
    return GpuleaseError(
        f"cannot read the daemon's answer: {why}",
        "after an upgrade, restart the daemon; running jobs continue",
    )


def _see_log(path: StrPath) -> str:
    """Return where the log of the daemon on `path` is, which only the path can tell."""
    path = Path(path)
    if path == config.personal_socket():
        return f"see its log: {config.personal_state() / config.PERSONAL_LOG}"
    if path == config.SYSTEM_SOCKET:
        return "see its log: journalctl -u gpuleased"
    return f"see the log of the gpuleased that was started with --socket {path}"


def _personal_hint() -> str:
    return (
        "it is your own daemon: gpulease list starts it again if it has ended; "
        f"{_see_log(config.personal_socket())}"
    )
