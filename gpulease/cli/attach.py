"""`gpulease attach`: come back to a job, from this terminal or another, and be its terminal."""

from typing import Annotated

import typer

from gpulease.cli import messages
from gpulease.cli.attachment import DEFAULT_KEYS, parse_keys
from gpulease.cli.caller import environment
from gpulease.cli.connect import SocketOption, connect
from gpulease.cli.exit_codes import status_of_job
from gpulease.cli.follow import FollowOptions, follow
from gpulease.cli.options import DetachKeysOption
from gpulease.cli.render import talk
from gpulease.cli.signals import Signals
from gpulease.errors import WrongState


def attach(
    ctx: typer.Context,
    job: Annotated[int, typer.Argument(metavar="JOB", help="The id of a job.")],
    watch: Annotated[
        bool, typer.Option("--watch", "--read-only", help="Only look; type nothing into it.")
    ] = False,
    detach_keys: DetachKeysOption = None,
    socket: SocketOption = None,
) -> int:
    """Show what a job wrote last, go on live, and exit as it exits.

    A job on a terminal gets this one: keys, colours, size. A job on pipes gets
    Ctrl-C. Ctrl-\\ and then d leave it running; closing the terminal does too.

    \b
    Examples:
      gpulease attach 17
      gpulease attach --watch 17
      gpulease attach --detach-keys ctrl-p,ctrl-q 17
    """
    keys = detach_sequence(detach_keys)
    client = connect(ctx, socket)
    view = client.job(job)
    if view.kind == "hold":
        raise WrongState(
            f"cannot attach to job {job}: it is a hold, a lease without a command",
            f"gpulease show {job} tells of it, gpulease cancel {job} releases it",
        )
    voice = talk()
    if view.state == "ended":
        voice.say(messages.ended(view))
        return status_of_job(view)
    with Signals() as signals:
        errand = FollowOptions(started=False, watches=watch, keys=keys)
        return follow(client, view, signals, voice, errand)


def detach_sequence(option: str | None) -> bytes:
    """Return the keys that detach, by the option, the environment, or as they are anyway.

    Raises:
        BadValue: they cannot be read.
    """
    return parse_keys(option or environment().get("GPULEASE_DETACH_KEYS") or DEFAULT_KEYS)
