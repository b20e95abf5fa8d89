"""Which daemon an everyday verb asks: the same as `connect` finds, with fewer imports."""

from __future__ import annotations

from gpulease.cli.render import print_stderr
from gpulease.client.light_client import LightClient
from gpulease.client.transport import listening
from gpulease.cluster_choice import acts_on_slurm
from gpulease.locations import environment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path


def light_client(socket: Path | str | None, verb: str | None = None) -> LightClient:
    """Return a client of the first daemon that answers; `socket` is the value of --socket.

    Raises:
        NoDaemon: no daemon answers; the message says what cannot be done, `verb`.
    """
    if (transport := listening(socket, environment())) is not None:
        return LightClient(transport)
    from gpulease.cli.connect import reach

    return reach(socket, verb)


def queue_client(socket: Path | str | None, verb: str) -> LightClient:
    """Return a client for a verb on jobs of a machine's own queue. Raises as `light_client`.

    Raises:
        WrongState: numbers of jobs here are those of Slurm.
    """
    if acts_on_slurm(socket):
        from gpulease.slurm.command.no_daemon import not_for_slurm

        raise not_for_slurm(verb)
    return light_client(socket, verb)


def client_or_start(socket: Path | str | None, verb: str | None = None) -> LightClient:
    """Return a client of the daemon, which is started if it is the user's own and does not run.

    Raises as `connect.reach_or_start`.
    """
    if (transport := listening(socket, environment())) is not None:
        return LightClient(transport)
    from gpulease.cli.connect import reach_or_start, started_message

    client, started = reach_or_start(socket, verb)
    if started:
        print_stderr(started_message(client))
    return LightClient(client.transport)
