"""Which daemon an everyday verb asks: the same as `connect` finds, with fewer imports."""

from __future__ import annotations

from gpulease.client.light_client import LightClient
from gpulease.client.transport import listening
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
