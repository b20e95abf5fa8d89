"""Find the daemon as the command does, and start one for this user where there is none."""

import logging

from gpulease import config, personal
from gpulease.client import (
    Client,
    answers,
    machine_daemon,
    trusted_users,
)

_log = logging.getLogger("gpulease")


def reach() -> Client:
    """Return a client of the first daemon that answers, if need be one that is started now.

    Raises:
        NoDaemon: the machine's does not come back, or none could be started. One that
            GPULEASE_SOCKET names is not looked for here: the client's methods say that it does
            not answer.
    """
    *system, own = config.candidate_sockets(None)
    if not system:
        return Client(own, trusted=trusted_users())
    state = config.personal_settings().state
    found = machine_daemon(_log.warning) or personal.answering(own, state, answers)
    if found is None:
        found, started = personal.ensure(own, state, answers, personal.daemon_command())
        if started:
            _log.warning("gpulease: no daemon was running; started one for you (socket %s)", found)
    return Client(found, trusted=trusted_users())
