"""Finding the daemon: the one that was named, the machine's, or the user's own.

The machine's daemon: the directory of its socket says that there is one, also while it is away.

Then nobody is to use, or start, one of their own instead: both would lease the same memory.
"""

import logging
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gpulease import config
from gpulease.client.errors import no_daemon, not_trusted
from gpulease.client.unix_socket import answers, dial, stranger_on
from gpulease.errors import NoDaemon

BACK_WITHIN_S = 20.0
"""How long it may be away: a restart takes a few seconds."""
_LOOKS_EVERY_S = 0.2
_ANSWERS_WITHIN_S = 5.0


def has_daemon() -> bool:
    """Tell whether a daemon serves this machine, be it there or not at this moment."""
    return config.SYSTEM_SOCKET.parent.is_dir()


def machine_daemon(say: Callable[[str], None]) -> Path | None:
    """Return the socket of the machine's daemon once that answers; None if there is none.

    `say` is told, once, what is waited for.

    Raises:
        NoDaemon: the machine has one, and it stays away.
    """
    path, until = config.SYSTEM_SOCKET, None
    while (obstacle := _obstacle(path)) is not None:
        if not has_daemon():
            return None
        if until is None:
            until = time.monotonic() + BACK_WITHIN_S
            say(f"gpulease: waiting up to {BACK_WITHIN_S:.0f}s for the machine's daemon on {path}")
        elif time.monotonic() >= until:
            raise NoDaemon(no_daemon(path, obstacle).message, _hint())
        else:
            time.sleep(_LOOKS_EVERY_S)
    return path


def _obstacle(path: Path) -> OSError | None:
    try:
        dial(path, _ANSWERS_WITHIN_S).close()
    except OSError as error:
        return error
    return None


def _hint() -> str:
    own, program = config.personal_socket(), Path(sys.executable).with_name("gpuleased")
    return (
        "systemctl status gpuleased says how it is; a daemon of your own beside it would lease the "
        "same memory once more; if you want that all the same: "
        f"export GPULEASE_SOCKET={own}; {program} --personal &"
    )


_log = logging.getLogger("gpulease")


def find(candidates: Sequence[Path]) -> Path:
    """Return the first of `candidates` that answers.

    A single candidate was named; whether it answers shows when it is asked. Where the machine has a
    daemon, that one is waited for, and it is that one or none.

    Raises:
        NoDaemon: none of several answers.
    """
    if len(candidates) == 1:
        return candidates[0]
    found = machine_daemon(_log.warning)
    found = found or next((path for path in candidates if answers(path)), None)
    if found is None:
        raise no_daemon_on(candidates)
    return found


def no_daemon_on(candidates: Sequence[Path]) -> NoDaemon:
    """Return the error that says where no daemon listens, or who does, and what to do about it."""
    for path in candidates:
        if (uid := stranger_on(path)) is not None:
            return not_trusted(path, uid)
    return NoDaemon(
        "cannot reach a daemon: none listens on " + " or ".join(map(str, candidates)),
        "gpulease run starts one for you; for everyone an admin starts gpuleased as root",
    )
