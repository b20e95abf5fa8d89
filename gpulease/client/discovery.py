"""Finding the daemon: the one that was named, the machine's, or the user's own.

The directory of its socket shows that the machine has a daemon, also while it restarts. Then no
user daemon may be used or started: both would lease the same memory.
"""

import logging
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gpulease import config, daemon_packages
from gpulease.client.errors import no_daemon, not_trusted
from gpulease.client.unix_socket import answers, dial, stranger_on
from gpulease.daemon_packages import INSTALL_HINT
from gpulease.errors import NoDaemon

BACK_WITHIN_S = 20.0
"""Time for a restart, which takes a few seconds."""
_LOOKS_EVERY_S = 0.2
_ANSWERS_WITHIN_S = 5.0


def has_daemon() -> bool:
    """Tell whether the machine has a daemon, running or not."""
    return config.SYSTEM_SOCKET.parent.is_dir()


def machine_daemon(say: Callable[[str], None]) -> Path | None:
    """Return the socket of the machine's daemon once it answers; None if there is none.

    `say` gets a line if this has to wait.

    Raises:
        NoDaemon: the machine has a daemon, and it does not answer in time.
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
        "see systemctl status gpuleased; to run your own daemon all the same, which would lease "
        f"the same memory a second time: export GPULEASE_SOCKET={own}; {program} --personal &"
    )


_log = logging.getLogger("gpulease")


def find(candidates: Sequence[Path]) -> Path:
    """Return the first of `candidates` that answers.

    A single candidate was named by the user, and is returned unchecked. If the machine has a
    daemon, no other one is returned.

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
    """Return the error for sockets on which no daemon answers, or one of another user."""
    for path in candidates:
        if (uid := stranger_on(path)) is not None:
            return not_trusted(path, uid)
    start = INSTALL_HINT if daemon_packages.missing() else "gpulease run"
    return NoDaemon(
        "cannot reach a daemon: none listens on " + " or ".join(map(str, candidates)),
        f"for a daemon of your own: {start}; for everyone an admin starts gpuleased as root",
    )
