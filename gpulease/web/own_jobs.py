"""What a user does with jobs of their own from a browser: verbs of the command, run as this user.

Only `gpulease web` has these pages. Who reaches its socket is the user: the daemon knows them by
the uid of this process, as it knows the command.
"""

import asyncio
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from gpulease.errors import BadUsage, GpuleaseError, NotAllowed
from gpulease.peer_credentials import user_name
from gpulease.web.pages import Pages, is_array, page
from gpulease.wire.jobs import JobView
from gpulease.wire.text import terminal_lines

_COMMAND_WITHIN_S = 60.0
_MOST_COMMANDS = 4
"""Commands that run at once; each takes about 20 MiB."""
_LARGEST_FORM = 4096
_MOST_FORMS = 1000
_LAST_LINES = 400
_MOST_OUTPUT = 256 * 1024


@dataclass(frozen=True, slots=True)
class Action:
    """A verb on a job."""

    name: str
    """In the address."""
    label: str
    words: tuple[str, ...]
    """Of the command; JOB and SPAN stand for the job and for what the user types."""
    fits: Callable[[JobView], bool]
    """Whether it makes sense for a job as it is now."""
    question: str
    span: str = ""
    """What a field for a length of time has at first; empty: there is none."""

    def command(self, job: str, span: str) -> list[str]:
        """Return the words after `gpulease`."""
        given = {"JOB": job, "SPAN": f"+{span.strip().removeprefix('+')}"}
        return [given.get(word, word) for word in self.words]


def _is_held(job: JobView) -> bool:
    return job.state == "queued" and job.queue is not None and job.queue.held


def _is_free(job: JobView) -> bool:
    return job.state == "queued" and not _is_held(job)


ACTIONS = (
    Action(
        "cancel", "Cancel", ("cancel", "JOB"), lambda job: job.state != "ended",
        "A waiting job leaves the queue. A running one is asked to end, and is killed after its "
        "grace.",
    ),
    Action(
        "extend", "Add time", ("extend", "JOB", "SPAN"),
        lambda job: job.state == "active" and job.expires_at is not None,
        "The time limit of the job moves by so much.", span="1h",
    ),
    Action(
        "keep", "Keep its lease", ("keep", "JOB"), lambda job: job.state == "active",
        "For an hour its lease is not taken back while nobody uses it.",
    ),
    Action(
        "hold", "Hold", ("edit", "JOB", "--held"), _is_free,
        "The job stays in the queue, and does not start until you release it.",
    ),
    Action(
        "release", "Release", ("edit", "JOB", "--no-held"), _is_held,
        "The job may start again. It has kept its place.",
    ),
    Action(
        "again", "Run again", ("again", "JOB", "--detach"),
        lambda job: job.state == "ended" and job.kind == "run",
        "Its command is submitted once more, with its options and directory, and with the "
        "environment in which gpulease web was started.",
    ),
)  # fmt: skip


class OwnJobs:
    """The pages on which the user acts."""

    def __init__(self, pages: Pages, socket: Path) -> None:
        """`socket` is that of the daemon."""
        self._pages = pages
        self._socket = socket
        self._tokens: dict[str, str] = {}
        """Of the forms that were not sent yet, the oldest first, with their paths."""
        self._running = asyncio.Semaphore(_MOST_COMMANDS)
        self.user = user_name(os.geteuid())

    def routes(self) -> list[BaseRoute]:
        """Return what is served besides the pages that anyone may see."""
        acting = [
            Route(f"/jobs/{{job}}/{action.name}", self._handler(action), methods=["GET", "POST"])
            for action in ACTIONS
        ]
        return [Route("/jobs/{job}/output", self.output), *acting]

    def actions(self, job: JobView) -> list[Action]:
        """Return what the user can do with a job; nothing with those of others."""
        is_own = job.user == self.user and job.kind != "slurm"
        return [action for action in ACTIONS if is_own and action.fits(job)]

    def _handler(self, action: Action) -> Callable[[Request], object]:
        async def answer(request: Request) -> Response:
            job = await self._own_job(request)
            name = request.path_params["job"]
            if request.method != "POST":
                return page(
                    request, "action.html", job=job, asked=name, action=action,
                    token=self._new_token(request.url.path), is_array=is_array(job, name),
                )  # fmt: skip
            span = await self._confirmed(request)
            words = action.command(name, span)
            status, output = await self._run(words)
            return page(
                request, "done.html", 200 if status == 0 else 409, job=job, asked=name,
                action=action, words=words, status=status, lines=terminal_lines(output.rstrip()),
            )  # fmt: skip

        return answer

    async def output(self, request: Request) -> Response:
        """Show the last lines of the output of a job."""
        job = await self._own_job(request)
        name = request.path_params["job"]
        words = ["logs", "--tail", str(_LAST_LINES), name]
        _, output = await self._run(words)
        lines = terminal_lines(output.rstrip())
        return page(request, "output.html", job=job, asked=name, lines=lines, most=_LAST_LINES)

    async def _own_job(self, request: Request) -> JobView:
        """Return the job of the address.

        Raises:
            NoSuchJob: there is none.
            NotAllowed: it is another user's, even where an admin could act on it.
        """
        job = await self._pages.asked_job(request)
        if job.user != self.user or job.kind == "slurm":
            raise NotAllowed(
                f"cannot do this with job {request.path_params['job']}: it is not one of your jobs",
                "admins act on jobs of others with the command",
            )
        is_cancelled = request.url.path.endswith("/cancel")
        if is_array(job, request.path_params["job"]) and not is_cancelled:
            raise NotAllowed(
                f"cannot do this with array {job.id} as a whole",
                "its elements have pages of their own",
            )
        return job

    def _new_token(self, path: str) -> str:
        if len(self._tokens) >= _MOST_FORMS:
            del self._tokens[next(iter(self._tokens))]
        token = secrets.token_urlsafe()
        self._tokens[token] = path
        return token

    async def _confirmed(self, request: Request) -> str:
        """Check that the user has sent the form of this page, and return what they typed.

        Raises:
            NotAllowed: another site has sent it, or it was sent before or to an earlier process, or
                it is the form of another job or action.
            BadUsage: it is no form of this page.
        """
        origin, host = request.headers.get("origin", ""), request.headers.get("host", "")
        if not host or origin not in (f"http://{host}", f"https://{host}"):
            raise NotAllowed("cannot do this: the request does not come from this page")
        length = request.headers.get("content-length", "")
        if not length.isdecimal() or int(length) > _LARGEST_FORM:
            raise BadUsage("cannot do this: the form is too large")
        fields = parse_qs((await request.body()).decode(errors="replace"))
        # Each form counts once: a second click, or a reload, must not act again.
        if self._tokens.pop(fields.get("token", [""])[0], "") != request.url.path:
            raise NotAllowed(
                "cannot do this: the form was sent already, or is not of this gpulease web",
                "the job's page shows what has become of it; open the form again to repeat it",
            )
        return fields.get("span", [""])[0].replace("\0", "")

    async def _run(self, words: Sequence[str]) -> tuple[int, str]:
        """Run the command, and return its exit status and the end of what it printed."""
        line = [words[0], "--socket", str(self._socket), *words[1:]]
        async with self._running:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "gpulease.cli", *line,
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )  # fmt: skip
            try:
                async with asyncio.timeout(_COMMAND_WITHIN_S):
                    assert process.stdout is not None
                    printed = b""
                    while piece := await process.stdout.read(_MOST_OUTPUT):
                        printed = (printed + piece)[-_MOST_OUTPUT:]
                    await process.wait()
            except TimeoutError:
                raise GpuleaseError(
                    f"cannot say whether this worked: gpulease {words[0]} takes longer than "
                    f"{_COMMAND_WITHIN_S:.0f} s",
                    "the job's page shows what has become of it",
                ) from None
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        assert process.returncode is not None
        return process.returncode, printed.decode(errors="replace")
