"""Which daemon a verb talks to: the one that was named, the system's, or the user's own."""

import os
from pathlib import Path
from typing import Annotated

import typer

from gpulease import config
from gpulease.client import Client, answers
from gpulease.errors import NoDaemon

SocketOption = Annotated[
    Path | None,
    typer.Option("--socket", metavar="PATH", help="The daemon's socket.", show_default=False),
]


def named_socket(ctx: typer.Context, socket: Path | None) -> Path | None:
    """Return what --socket says, after the verb or before it."""
    before: Path | None = ctx.find_root().params.get("socket")
    return socket or before


def connect(ctx: typer.Context, socket: Path | None) -> Client:
    """Return a client of the first daemon that answers.

    Raises:
        NoDaemon: none does.
    """
    candidates = config.candidate_sockets(named_socket(ctx, socket))
    if len(candidates) == 1:
        return Client(candidates[0])
    found = _first_answering(candidates)
    if found is None and config.personal_settings().state.joinpath("gpulease.db").exists():
        # The user's own has left since it was idle, and has things to tell.
        found, _ = connect_or_start(ctx, socket)
    if found is None:
        raise NoDaemon(
            "cannot reach a daemon: none listens on " + " or ".join(map(str, candidates)),
            "gpulease run starts one for you; for everyone an admin starts gpuleased as root",
        )
    return found


def connect_or_start(ctx: typer.Context, socket: Path | None) -> tuple[Client, bool]:
    """Return a client, and whether a daemon was started for it.

    One is started for the user where none answers and none was named.

    Raises:
        NoDaemon: the one that was named does not answer, or none could be started.
    """
    candidates = config.candidate_sockets(named_socket(ctx, socket))
    if len(candidates) == 1:
        return Client(candidates[0]), False
    if found := _first_answering(candidates):
        return found, False
    # Imported where it is needed: nearly every command finds a daemon.
    from gpulease import personal

    settings = config.personal_settings()
    started = personal.ensure(
        settings.socket, settings.state / "gpuleased.log", answers, personal.daemon_command()
    )
    return _trusting(settings.socket), started


def _first_answering(candidates: tuple[Path, ...]) -> Client | None:
    found = next((path for path in candidates if answers(path)), None)
    return None if found is None else _trusting(found)


def _trusting(path: Path) -> Client:
    # A socket that nobody named is believed only if root or the user laid it.
    return Client(path, trusted=frozenset({0, os.geteuid()}))
