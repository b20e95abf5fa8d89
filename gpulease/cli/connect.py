"""Which daemon a verb talks to: the one of --socket, the machine's, or the user's own."""

from pathlib import Path

from gpulease import config, user_daemon
from gpulease.cli.render import print_stderr
from gpulease.client import (
    Client,
    answers,
    machine_daemon,
    no_daemon_on,
    trusted_users,
)
from gpulease.cluster_choice import SLURM, cluster


def reach(named: Path | str | None, verb: str | None = None) -> Client:
    """Return a client of the first daemon that answers; `named` is the value of --socket.

    Raises:
        NoDaemon: no daemon answers; the message says what cannot be done, `verb`.
    """
    candidates = config.candidate_sockets(None if named is None else Path(named))
    if len(candidates) == 1:
        return _named(named, candidates[0])
    state = config.personal_settings().state
    found = _first_answering(candidates[-1], state)
    if found is None:
        _refuse_on_cluster(verb)
    if found is None and state.joinpath("gpulease.db").exists():
        # The user's own daemon has exited, as idle ones do, and its record holds ended jobs.
        found, _ = reach_or_start(named)
    if found is None:
        raise no_daemon_on(candidates)
    return found


def reach_or_start(named: Path | str | None, verb: str | None = None) -> tuple[Client, bool]:
    """Return a client, and whether a daemon was started for it; `named` is the value of --socket.

    A daemon is started for the user if none was named, the machine has none and is not part of a
    cluster, and the user has none that answers. A message says if the user's daemon simulates other
    GPUs than GPULEASE_SIMULATE.

    Raises:
        NoDaemon: the machine's daemon does not return, or the user's cannot be started.
    """
    candidates = config.candidate_sockets(None if named is None else Path(named))
    if len(candidates) == 1:
        return _named(named, candidates[0]), False
    settings = config.personal_settings()
    if found := _first_answering(settings.socket, settings.state):
        if found.path != config.SYSTEM_SOCKET and (warning := _other_gpus(settings.state)):
            print_stderr(warning)
        return found, False
    _refuse_on_cluster(verb)
    path, started = user_daemon.ensure(
        settings.socket, settings.state, answers, user_daemon.daemon_command()
    )
    return _trusting(path), started


def _refuse_on_cluster(verb: str | None) -> None:
    """Refuse `verb` where Slurm has the GPUs: a daemon for the user would have none."""
    if cluster(config.environment()) == SLURM:
        from gpulease.slurm.command.no_daemon import no_daemon_here

        raise no_daemon_here(verb)


def started_message(client: Client) -> str:
    """Say that a daemon was started for the user."""
    return f"gpulease: no daemon was running; started one for you (socket {client.path})"


def _other_gpus(state: Path) -> str | None:
    wanted = config.environment().get("GPULEASE_SIMULATE")
    running = user_daemon.serving(state)
    if not wanted or running is None or running.simulate == wanted:
        return None
    gpus = f"simulates {running.simulate}" if running.simulate else "uses the real GPUs"
    return (
        f"gpulease: GPULEASE_SIMULATE={wanted} has no effect: your daemon already {gpus}; "
        f"to change that, end it: kill {running.pid}"
    )


def _first_answering(own: Path, state: Path) -> Client | None:
    """Return a client of the machine's daemon, or else of the user's own, on any socket.

    Raises:
        NoDaemon: the machine has a daemon that is down and does not return.
    """
    found = machine_daemon(print_stderr) or user_daemon.answering(own, state, answers)
    return None if found is None else _trusting(found)


def _named(named: Path | str | None, path: Path) -> Client:
    # GPULEASE_SOCKET may have been set by another user (su, sudo -E); --socket was typed.
    return Client(path, trusted=None) if named is not None else _trusting(path)


def _trusting(path: Path) -> Client:
    return Client(path, trusted=trusted_users())
