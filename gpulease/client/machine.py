"""The machine's daemon: the directory of its socket says that there is one, also while it is away.

Then nobody is to use, or start, one of their own instead: both would lease the same memory.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from gpulease import config
from gpulease.client.dial import dial
from gpulease.client.failures import no_daemon
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
