"""Finding the daemon: the one that was named, the machine's, or the user's own."""

import logging
from collections.abc import Sequence
from pathlib import Path

from gpulease.client.dial import answers, stranger_on
from gpulease.client.failures import not_trusted
from gpulease.client.machine import machine_daemon
from gpulease.errors import NoDaemon

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
