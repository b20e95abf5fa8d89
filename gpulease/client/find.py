"""Finding the daemon: the one that was named, the machine's, or the user's own."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from gpulease.client.dial import answers
from gpulease.client.machine import machine_daemon
from gpulease.errors import NoDaemon

_log = logging.getLogger("gpulease")


def trusted_users() -> frozenset[int]:
    """Return who may listen on a socket that nobody named: root, and the user themselves."""
    return frozenset({0, os.geteuid()})


def trusted_where_named(*, on_purpose: bool) -> frozenset[int] | None:
    """Return who may listen on a socket that was named; None is anyone at all.

    What root's environment names (GPULEASE_SOCKET) may be another user's word, kept by sudo(8) or
    su(1); an option or an argument is root's own.
    """
    return None if on_purpose or os.geteuid() != 0 else trusted_users()


def find(candidates: Sequence[Path]) -> tuple[Path, frozenset[int] | None]:
    """Return the first of `candidates` that answers, and whom to trust there; None is anyone.

    A single candidate was named by the environment, see `trusted_where_named`; whether it answers
    shows when it is asked. Where the machine has a daemon, that one is waited for, and it is that
    one or none.

    Raises:
        NoDaemon: none of several answers.
    """
    if len(candidates) == 1:
        return candidates[0], trusted_where_named(on_purpose=False)
    found = machine_daemon(_log.warning)
    found = found or next((path for path in candidates if answers(path)), None)
    if found is None:
        raise no_daemon_on(candidates)
    return found, trusted_users()


def no_daemon_on(candidates: Sequence[Path]) -> NoDaemon:
    """Return the error that says where nobody listens, and how to come by a daemon."""
    return NoDaemon(
        "cannot reach a daemon: none listens on " + " or ".join(map(str, candidates)),
        "gpulease run starts one for you; for everyone an admin starts gpuleased as root",
    )
