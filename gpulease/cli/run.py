"""`gpulease run`: lease, wait, run as if there were no lease, and exit as the command exits."""

import os
import sys
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from gpulease.cli.caller import environment, this_process
from gpulease.cli.connect import SocketOption, connect_or_start
from gpulease.cli.follow import Talk, follow
from gpulease.cli.program import resolve
from gpulease.cli.render import draw, say, screen_of, show, terminal_width
from gpulease.cli.request import RunOptions, build
from gpulease.cli.signals import Signals
from gpulease.cli.text import asks
from gpulease.cli.waiting import WaitingLine
from gpulease.client import Client
from gpulease.wire import JobView, SubmitRequest, to_wire

_option = partial(typer.Option, show_default=False)


def run(  # noqa: PLR0913, PLR0917  typer reads the options from the arguments
    ctx: typer.Context,
    command: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND", help="What to run; a .py runs under your python."),
    ],
    mem: Annotated[
        str | None, _option("--mem", metavar="SIZE", help="Memory on each GPU: 4G, 4096M, 40%.")
    ] = None,
    gpus: Annotated[int, _option("--gpus", metavar="N", help="How many GPUs; 1 if left out.")] = 1,
    exclusive: Annotated[bool, _option("--exclusive", help="Share the GPUs with nobody.")] = False,
    time: Annotated[
        str | None,
        _option("--time", metavar="SPAN", help="End the job after 90s, 30m, 4h, 1d12h."),
    ] = None,
    name: Annotated[
        str | None, _option("--name", metavar="TEXT", help="What listings call the job.")
    ] = None,
    detach: Annotated[
        bool, _option("-d", "--detach", help="Print the job's id and return at once.")
    ] = False,
    no_wait: Annotated[
        bool, _option("--no-wait", help="Give up (exit 75) if it would have to wait.")
    ] = False,
    wait: Annotated[
        str | None, _option("--wait", metavar="SPAN", help="Give up (exit 75) after so long.")
    ] = None,
    visible: Annotated[
        Literal["uuid", "index"],
        _option("--visible", help="How CUDA_VISIBLE_DEVICES names the GPUs; uuid if left out."),
    ] = "uuid",
    growth: Annotated[
        bool, _option("--growth", help="TensorFlow takes memory as it needs it.")
    ] = False,
    split: Annotated[
        int, _option("--split", metavar="N", help="Show each GPU as N logical ones.")
    ] = 1,
    inter_op_threads: Annotated[
        int | None, _option("--inter-op-threads", metavar="N", help="TensorFlow's, between ops.")
    ] = None,
    intra_op_threads: Annotated[
        int | None, _option("--intra-op-threads", metavar="N", help="TensorFlow's, within an op.")
    ] = None,
    soft_placement: Annotated[
        bool, _option("--soft-placement", help="Ops without a GPU kernel run on the CPU.")
    ] = False,
    log_placement: Annotated[
        bool, _option("--log-placement", help="Log where each op is placed.")
    ] = False,
    strict: Annotated[
        bool, _option("--strict", help="Fail if the framework cannot be held to the lease.")
    ] = False,
    socket: SocketOption = None,
) -> int:
    """Run COMMAND on a GPU where SIZE of memory is its own, waiting for it if need be.

    The job is you: your python, your directory, your environment. Options of
    gpulease go before COMMAND; what follows it belongs to it.

    \b
    Examples:
      gpulease run --mem 4G train.py --epochs 3
      gpulease run --mem 40% --gpus 2 --time 4h -- torchrun train.py
      gpulease run --mem 8G -d --name sweep-7 bash sweep.sh
      gpulease run --mem 4G --no-wait train.py || echo "no room now"

    \b
    Exit code: COMMAND's own, or
      128+N  signal N ended it         124  its time limit ended it
       75    --no-wait or --wait gave up    125  gpulease itself failed
      126    COMMAND cannot be executed     127  COMMAND was not found
    """
    options = RunOptions(
        mem=mem,
        gpus=gpus,
        exclusive=exclusive,
        time=time,
        name=name,
        wait=wait,
        no_wait=no_wait,
        detach=detach,
        visible=visible,
        growth=growth,
        split=split,
        inter_op_threads=inter_op_threads,
        intra_op_threads=intra_op_threads,
        soft_placement=soft_placement,
        log_placement=log_placement,
        strict=strict,
    )
    caller = this_process()
    if not options.detach and os.isatty(1):
        # The job writes to a pipe and not to this terminal, and Python would hold its output back.
        unbuffered = {"PYTHONUNBUFFERED": "1", **caller.environment}
        caller = replace(caller, environment=unbuffered)
    request = build(options, command, caller)
    found = resolve(command, Path(caller.cwd), caller.environment)
    request.argv = [to_wire(word) for word in found]
    client, started = connect_or_start(ctx, socket)
    if started:
        say(f"gpulease: no daemon was running; started one for you (socket {client.path})")
    return _submit(client, request, options)


def _submit(client: Client, request: SubmitRequest, options: RunOptions) -> int:
    if options.detach:
        job = client.submit(request)
        _tell_the_default(job, options)
        show(str(job.id))
        return 0
    with Signals() as signals:
        job = client.submit(request)
        _tell_the_default(job, options)
        return follow(client, job, signals, _talk())


def _tell_the_default(job: JobView, options: RunOptions) -> None:
    if options.mem is None:
        say(f"gpulease: job {job.id} leases the default of {asks(job)}; --mem says otherwise")


def _talk() -> Talk:
    screen = screen_of(sys.stderr, environment())
    rewrites = screen.width is not None and environment().get("TERM", "dumb") != "dumb"
    return Talk(
        say=say,
        line=WaitingLine(draw, terminal_width if rewrites else None),
        now=lambda: datetime.now(UTC).astimezone(),
    )
