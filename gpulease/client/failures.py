"""What can go wrong between command and daemon, as the errors that a user reads."""

import os
from pathlib import Path

import msgspec

from gpulease import errors, wire
from gpulease.errors import GpuleaseError, NoDaemon

_NO_DAEMON_HINT = (
    "ask whoever runs this machine to start gpuleased, or name another socket with --socket"
)


def error_of(status: int, body: bytes) -> GpuleaseError:
    try:
        told = msgspec.json.decode(body, type=wire.ErrorReply).error
    except msgspec.MsgspecError:
        return GpuleaseError(
            f"cannot get an answer: the daemon replied with HTTP {status}",
            "what happened is in its log: journalctl -u gpuleased",
        )
    return errors.BY_CODE.get(told.code, GpuleaseError)(told.message, told.hint)


def no_daemon(path: Path, error: Exception) -> NoDaemon:
    shown = os.fsencode(path).decode(errors="replace")
    match error:
        case FileNotFoundError() | NotADirectoryError():
            why, hint = f"there is no socket {shown}", _NO_DAEMON_HINT
        case ConnectionRefusedError():
            why, hint = f"nothing listens on {shown}", _NO_DAEMON_HINT
        case PermissionError():
            why = f"you may not open the socket {shown}"
            hint = "the socket of a shared daemon is open to every user: gpulease doctor, as root"
        case TimeoutError() | BlockingIOError():
            why = f"it does not answer on {shown}"
            hint = "its log says what it is busy with: journalctl -u gpuleased"
        case _:
            why, hint = f"{shown}: {error}", _NO_DAEMON_HINT
    return NoDaemon(f"cannot reach the daemon: {why}", hint)


def lost(path: Path) -> NoDaemon:
    return NoDaemon(
        f"cannot read on from the daemon: the connection to {path} broke off",
        "jobs go on without it; ask again: gpulease list",
    )
