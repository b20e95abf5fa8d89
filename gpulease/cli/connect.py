"""Which daemon a verb talks to: the one that was named, the machine's, or the user's own."""

from pathlib import Path
from typing import Annotated

import typer

from gpulease import config, user_daemon
from gpulease.cli.render import say
from gpulease.client import (
    Client,
    answers,
    machine_daemon,
    no_daemon_on,
    trusted_users,
)

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
        return _named(ctx, socket, candidates[0])
    state = config.personal_settings().state
    found = _first_answering(candidates[-1], state)
    if found is None and state.joinpath("gpulease.db").exists():
        # The user's own has left since it was idle, and has things to tell.
        found, _ = connect_or_start(ctx, socket)
    if found is None:
        raise no_daemon_on(candidates)
    return found


def connect_or_start(ctx: typer.Context, socket: Path | None) -> tuple[Client, bool]:
    """Return a client, and whether a daemon was started for it.

    One is started for the user where none was named, the machine has none and none of theirs
    answers. Where one of theirs answers that simulates other GPUs than GPULEASE_SIMULATE asks for,
    they are told.

    Raises:
        NoDaemon: the machine's does not come back, or none could be started.
    """
    candidates = config.candidate_sockets(named_socket(ctx, socket))
    if len(candidates) == 1:
        return _named(ctx, socket, candidates[0]), False
    settings = config.personal_settings()
    if found := _first_answering(settings.socket, settings.state):
        if found.path != config.SYSTEM_SOCKET and (other := _other_gpus(settings.state)):
            say(other)
        return found, False
    path, started = user_daemon.ensure(
        settings.socket, settings.state, answers, user_daemon.daemon_command()
    )
    return _trusting(path), started


def _other_gpus(state: Path) -> str | None:
    wanted = config.environment().get("GPULEASE_SIMULATE")
    told = user_daemon.serving(state)
    if not wanted or told is None or told.simulate == wanted:
        return None
    has = f"simulates {told.simulate}" if told.simulate else "serves the real GPUs"
    return (
        f"gpulease: your daemon {has}, whatever GPULEASE_SIMULATE={wanted} says now; "
        f"end it first: kill {told.pid}"
    )


def _first_answering(own: Path, state: Path) -> Client | None:
    """Return a client of the machine's daemon, or of the user's own, wherever it listens.

    Raises:
        NoDaemon: the machine has one, and it does not come back.
    """
    found = machine_daemon(say) or user_daemon.answering(own, state, answers)
    return None if found is None else _trusting(found)


def _named(ctx: typer.Context, socket: Path | None, path: Path) -> Client:
    # An environment may come from another user, through su(1) or sudo -E, or from advice.
    by_option = named_socket(ctx, socket) is not None
    return Client(path, trusted=None) if by_option else _trusting(path)


def _trusting(path: Path) -> Client:
    return Client(path, trusted=trusted_users())
