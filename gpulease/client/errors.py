"""What can go wrong between command and daemon, as the errors that a user reads."""

import os
import pwd
from pathlib import Path

import msgspec

from gpulease import config, errors
from gpulease.client.unix_socket import trusted_users
from gpulease.errors import GpuleaseError, NoDaemon
from gpulease.wire.views import (
    ErrorReply,
)

_NO_DAEMON_HINT = (
    "ask whoever runs this machine to start gpuleased, or name another socket with --socket"
)


def error_of(status: int, body: bytes, path: Path) -> GpuleaseError:
    try:
        told = msgspec.json.decode(body, type=ErrorReply).error
    except msgspec.MsgspecError:
        return GpuleaseError(
            f"cannot get an answer: the daemon replied with HTTP {status}",
            _in_the_log("what happened is in", path),
        )
    return errors.BY_CODE.get(told.code, GpuleaseError)(told.message, told.hint)


def no_daemon(path: Path, error: Exception) -> NoDaemon:
    shown = os.fsencode(path).decode(errors="replace")
    nobody = _personal_hint() if path == config.personal_socket() else _NO_DAEMON_HINT
    if isinstance(error, PermissionError | ConnectionRefusedError):
        owner = _owner(path)
        if owner is not None and owner not in trusted_users():
            return not_trusted(path, owner)
    match error:
        case FileNotFoundError() | NotADirectoryError():
            why, hint = f"there is no socket {shown}", nobody
        case ConnectionRefusedError():
            why, hint = f"nothing listens on {shown}", nobody
        case PermissionError():
            why = f"you may not open the socket {shown}"
            hint = "the socket of a shared daemon is open to every user: gpulease doctor, as root"
        case TimeoutError() | BlockingIOError():
            why = f"it does not answer on {shown}"
            hint = _in_the_log("it may be stopped or busy; see", path)
        case _:
            why, hint = f"{shown}: {error}", nobody
    return NoDaemon(f"cannot reach the daemon: {why}", hint)


def _owner(path: Path) -> int | None:
    try:
        return path.lstat().st_uid
    except OSError:
        return None


class NotTrusted(NoDaemon):
    """The socket is another user's."""


def not_trusted(path: Path, uid: int) -> NotTrusted:
    """Return the error for a socket on which neither root nor the caller listens."""
    why = "that user would see the environment of your jobs"
    if path == config.personal_socket():
        what = (
            f"ask an admin to remove {path.parent}; until then your own daemon can listen "
            'elsewhere: export XDG_RUNTIME_DIR="$(mktemp -d)"'
        )
    elif path == config.SYSTEM_SOCKET:
        what = "tell an admin: only root's daemon belongs there"
    else:
        what = (
            "without GPULEASE_SOCKET and --socket gpulease finds the machine's daemon, or starts "
            "one of your own"
        )
    return NotTrusted(
        f"cannot trust the daemon on {path}: it belongs to {_name(uid)}, "
        "who is neither root nor you",
        f"{why}; {what}",
    )


def _name(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"user {uid}"


class AnswerLost(NoDaemon):
    """The daemon may have done what it was asked: it was, and its answer did not come."""


def answer_lost(path: Path, error: Exception) -> AnswerLost:
    told = no_daemon(path, error)
    return AnswerLost(told.message, told.hint)


def lost(path: Path) -> AnswerLost:
    return AnswerLost(
        f"cannot read on from the daemon: the connection to {path} broke off",
        "jobs go on without it; give the command again; "
        + _in_the_log("why it broke off may be in", path),
    )


def _in_the_log(what: str, path: Path) -> str:
    """Say where the daemon on `path` keeps its log: the user's in a file, the system's in systemd.

    Which daemon it is, its socket tells alone, since it is not there to be asked.
    """
    if path == config.personal_socket():
        return f"{what} its log: {config.personal_state() / config.PERSONAL_LOG}"
    if path == config.SYSTEM_SOCKET:
        return f"{what} its log: journalctl -u gpuleased"
    return f"{what} the log of the gpuleased that was started with --socket {path}"


def _personal_hint() -> str:
    return (
        "it is your own daemon: gpulease list starts it again if it has left, and why it left "
        f"is in its log: {config.personal_state() / config.PERSONAL_LOG}"
    )
