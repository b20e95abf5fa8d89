"""What can go wrong between command and daemon, as the errors that a user reads."""

import os
from pathlib import Path

import msgspec

from gpulease import config, errors, wire
from gpulease.errors import GpuleaseError, NoDaemon

_NO_DAEMON_HINT = (
    "ask whoever runs this machine to start gpuleased, or name another socket with --socket"
)


def error_of(status: int, body: bytes, path: Path) -> GpuleaseError:
    try:
        told = msgspec.json.decode(body, type=wire.ErrorReply).error
    except msgspec.MsgspecError:
        return GpuleaseError(
            f"cannot get an answer: the daemon replied with HTTP {status}",
            f"what happened is in its log: {_log_of(path)}",
        )
    return errors.BY_CODE.get(told.code, GpuleaseError)(told.message, told.hint)


def no_daemon(path: Path, error: Exception) -> NoDaemon:
    shown = os.fsencode(path).decode(errors="replace")
    nobody = _personal_hint() if path == config.personal_socket() else _NO_DAEMON_HINT
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
            hint = f"its log says what it is busy with: {_log_of(path)}"
        case _:
            why, hint = f"{shown}: {error}", nobody
    return NoDaemon(f"cannot reach the daemon: {why}", hint)


class AnswerLost(NoDaemon):
    """The daemon may have done what it was asked: it was, and its answer did not come."""


def answer_lost(path: Path, error: Exception) -> AnswerLost:
    told = no_daemon(path, error)
    return AnswerLost(told.message, told.hint)


def lost(path: Path) -> AnswerLost:
    return AnswerLost(
        f"cannot read on from the daemon: the connection to {path} broke off",
        f"jobs go on without it; ask again: gpulease list; its log: {_log_of(path)}",
    )


def _log_of(path: Path) -> str:
    """Say where the daemon on `path` keeps its log: the user's own in a file, others with systemd.

    A personal daemon is known by its socket's place alone, since it is not there to be asked.
    """
    if path != config.personal_socket():
        return "journalctl -u gpuleased"
    return str(config.personal_state() / config.PERSONAL_LOG)


def _personal_hint() -> str:
    return (
        "it is your own daemon: gpulease list starts it again if it has left, and why it left "
        f"is in its log: {config.personal_state() / config.PERSONAL_LOG}"
    )
