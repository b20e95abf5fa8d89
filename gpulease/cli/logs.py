"""`gpulease logs`: what a job has written, each stream to its own."""

from typing import Annotated

import typer

from gpulease.cli.connect import SocketOption, connect
from gpulease.cli.format import ordinal, sentence
from gpulease.cli.render import pass_on, say
from gpulease.wire.views import JobView


def logs(
    ctx: typer.Context,
    job: Annotated[int, typer.Argument(metavar="JOB", help="The id of a job.")],
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Go on until the job has ended.")
    ] = False,
    tail: Annotated[
        int | None, typer.Option("--tail", metavar="N", min=0, help="Only the last N lines.")
    ] = None,
    stdout: Annotated[bool, typer.Option("--stdout", help="Only its standard output.")] = False,
    stderr: Annotated[bool, typer.Option("--stderr", help="Only its standard error.")] = False,
    socket: SocketOption = None,
) -> None:
    """Print the output of a job: its stdout on stdout, its stderr on stderr, byte for byte.

    Of one that waits there is none yet; with -f its output comes when it starts.

    \b
    Examples:
      gpulease logs 17
      gpulease logs -f --tail 20 17
      gpulease logs --stdout 17 > result.csv
    """
    client = connect(ctx, socket)
    if why := unwritten(client.job(job)):
        say(f"gpulease: {why}")
    both = stdout == stderr
    pieces = client.logs(
        job, stdout=stdout or both, stderr=stderr or both, tail=tail, follow=follow
    )
    for kind, piece in pieces:
        pass_on(kind, piece)


def unwritten(job: JobView) -> str | None:
    """Say why a job has written nothing, if it has not been started."""
    why = f": {sentence(job.reason, job.hint)}" if job.reason else ""
    match job.state:
        case "queued":
            place = f", {ordinal(job.position)} in line" if job.position else ""
            return f"job {job.id} has not started; it waits{place}{why}"
        case "granted":
            return f"job {job.id} has not started; it is about to"
        case "ended" if job.started_at is None and job.kind == "run":
            return f"job {job.id} never started{why}"
        case _:
            return None
