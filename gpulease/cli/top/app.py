"""The application of `gpulease top`: looks at the daemon, and does what keys ask for."""

import asyncio
import gc
import os
import signal
import sys
import termios
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import ClassVar

from textual.app import App
from textual.binding import Binding, BindingType
from textual.drivers.linux_driver import LinuxDriver
from textual.message import Message
from textual.screen import ModalScreen

from gpulease.cli.cancel_jobs import result as cancelled
from gpulease.cli.cancel_jobs import summary
from gpulease.cli.change_jobs import read_extension, result_of_extend, result_of_keep
from gpulease.cli.follow_jobs import attach_to_job
from gpulease.cli.render import local_time, own_name
from gpulease.cli.signals import Killed
from gpulease.cli.top.gpus import MOST, STEP_S
from gpulease.cli.top.job_screen import JobScreen
from gpulease.cli.top.jobs import Jobs
from gpulease.cli.top.lines import Terminal
from gpulease.cli.top.machine_screen import MachineScreen
from gpulease.cli.top.poll import Look, Poller
from gpulease.cli.top.screens import Ask, Confirm, Help
from gpulease.cli.top.sections import Item, Stranger, parse_filter
from gpulease.client import Client
from gpulease.drawing.words import clean, id_of, ids_of, named
from gpulease.errors import GpuleaseError, NoSuchRoute
from gpulease.units import parse_span
from gpulease.wire.jobs import JobView
from gpulease.wire.requests import CancelJobsRequest

Act = Callable[[Client], str]


class _Driver(LinuxDriver):
    """Draws on standard output, as every other verb."""

    def __init__(
        self,
        app: App[None],
        *,
        debug: bool = False,
        mouse: bool = True,
        size: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(app, debug=debug, mouse=mouse, size=size)
        self._file = sys.__stdout__

    def _get_terminal_size(self) -> tuple[int, int]:
        """Ask the terminal: COLUMNS and LINES in the environment stay as they are at a resize."""
        size = os.get_terminal_size(1)
        return size.columns or 80, size.lines or 24


class TopApp(App[None]):
    """The live view."""

    TITLE = "gpulease top"
    ENABLE_COMMAND_PALETTE = False
    AUTO_FOCUS = None
    CSS = """
    Screen { background: ansi_default; }
    Confirm, Ask { background: transparent; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", show=False),
        Binding("ctrl+c", "quit", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", show=False, priority=True),
        Binding("question_mark,h,f1", "help", show=False),
        # With priority, the app itself takes the key: what is typed in the same burst is for the
        # question. Otherwise the focused widget has it already, and takes it for commands.
        Binding("slash", "filter('')", show=False, priority=True),
        Binding("g", "filter('gpu=')", show=False, priority=True),
        Binding("u", "filter('user=')", show=False, priority=True),
        Binding("c,delete", "cancel", show=False, priority=True),
        Binding("e", "extend", show=False, priority=True),
        Binding("k", "keep", show=False, priority=True),
        Binding("a", "attach", show=False, priority=True),
        Binding("p", "processes", show=False, priority=True),
        Binding("space", "look", show=False),
    ]

    class Looked(Message):
        """The daemon was asked."""

        def __init__(self, look: Look) -> None:
            super().__init__()
            self.look = look

    class Answered(Message):
        """A request of the user has an answer."""

        def __init__(self, result: object, error: GpuleaseError | None) -> None:
            super().__init__()
            self.result = result
            self.error = error

    def __init__(self, client: Client, every: float, terminal: Terminal) -> None:
        super().__init__(driver_class=_Driver, ansi_color=True)
        self.theme = "ansi-dark"
        self.animation_level = "none"
        self.killed: int | None = None
        """The signal that ended it."""
        self._client = client
        self._terminal = terminal
        self._machine = MachineScreen(own_name(), terminal)
        self._job: JobScreen | None = None
        self._has_history = False
        self._poller = Poller(client, every, lambda look: self._post(self.Looked(look)))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Leave letters to a question that is open."""
        asks = action in ("filter", "cancel", "extend", "keep", "attach", "processes")
        return not (asks and isinstance(self.screen, ModalScreen))

    @property
    def bug(self) -> Exception | None:
        """What ended it, if that was unexpected."""
        return self._exception

    def _fatal_error(self) -> None:
        """Close after a bug; `run` raises what happened, and Python prints it."""
        self._close_messages_no_wait()

    async def on_mount(self) -> None:
        """Show the machine, and begin to look."""
        await self.push_screen(self._machine)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end_by, number)
        self.app_resume_signal.subscribe(self, lambda _: self.screen.refresh(layout=True))
        self._poller.start()
        if not self.is_headless:
            # Widgets and styles live as long as the process: the collector need not visit them.
            gc.collect()
            gc.freeze()

    def on_unmount(self) -> None:
        """Stop looking."""
        self._poller.stop()

    def on_top_app_looked(self, message: Looked) -> None:
        """Show what the daemon said."""
        if not (self.is_headless or _has_terminal()):
            Killed(signal.SIGHUP).take_effect()  # nothing is left to restore
        look = message.look
        screen = self._job or self._machine
        screen.trouble(look.error)
        if look.status is None:
            return
        self._machine.see(look.status, look.at)
        self._poller.want(all_waiting=self._machine.needs_all)
        if self._job is not None and look.job is not None and look.job.id == self._job.job.id:
            now = datetime.fromtimestamp(look.at).astimezone()
            self._job.see(look.job, look.memory, look.status, now)
        if not self._has_history:
            self._has_history = True
            gpus = [gpu.uuid for gpu in look.status.gpus]
            self._poller.ask(lambda client: _histories(client, gpus), self._answer)

    def on_top_app_answered(self, message: Answered) -> None:
        """Show the result of a request, or why it failed."""
        screen = self._job or self._machine
        if message.error is not None:
            screen.fail(message.error)
        elif isinstance(message.result, str):
            screen.say(message.result)
        elif isinstance(message.result, list):
            self._machine.fill(message.result)

    def on_jobs_moved(self) -> None:
        """Ask for the rest of the queue when the end of what is known comes near."""
        self._poller.want(all_waiting=self._machine.needs_all)

    def on_jobs_opened(self, message: Jobs.Opened) -> None:
        """Open a job."""
        item = message.item
        if isinstance(item, Stranger):
            pid = item.process.pid
            hint = f"gpulease adopt {pid} leases what it uses"
            self._machine.say(f"process {pid} has no lease", hint)
            return
        self._open(JobScreen(item, self._client, self._terminal))

    def _open(self, screen: JobScreen) -> None:
        self._job = screen
        self._machine.cover(is_covered=True)
        self.push_screen(screen, self._left_job)
        self._poller.open(screen.job.id)

    def action_help(self) -> None:
        """Show the keys."""
        self.push_screen(Help())

    def action_look(self) -> None:
        """Look at once."""
        self._poller.look()

    def action_filter(self, begin: str) -> None:
        """Ask which rows to show."""
        text = f"{self._machine.wanted} {begin}".lstrip()
        self._ask("Show only: text, user=NAME, gpu=N", text, self._filter)

    def action_processes(self) -> None:
        """Show the processes of the selected job."""
        if (job := self._chosen_started("show the processes of")) is None:
            return
        if self._job is None:
            self._open(JobScreen(job, self._client, self._terminal, at_processes=True))
        else:
            self._job.action_processes()

    def action_cancel(self) -> None:
        """Cancel the selected job."""
        if (job := self._chosen()) is None:
            return
        if job.queue is not None and job.queue.array_waiting is not None:
            array = job.queue.array
            request = CancelJobsRequest(array=array)
            question = f"Cancel all jobs of array {array}, {named(job)} of {clean(job.user)}?"
            self._confirm(question, lambda client: summary(client.cancel_all(request)))
        else:
            self._confirm(f"Cancel {_named(job)}?", lambda client: cancelled(client.cancel(job.id)))

    def action_extend(self) -> None:
        """Change the time limit of the selected job."""
        if (job := self._chosen()) is None:
            return
        if job.queue is not None and job.queue.array_waiting is not None:
            array = job.queue.array
            hint = f"gpulease extend {array} +1h extends all its jobs"
            self._refuse(f"cannot extend array {array}: top extends one job at a time", hint)
        else:
            self._ask(
                f"Add time to the limit of {_named(job)}, or remove some: +2h, -30m",
                "+1h",
                lambda span: self._act(lambda client: _extended(client, job.id, span)),
            )

    def action_keep(self) -> None:
        """Protect the lease of the selected job."""
        if (job := self._chosen_started("keep")) is not None:
            self._ask(
                f"Keep the lease of {_named(job)}, even if it is idle, for",
                "1h",
                lambda span: self._act(lambda client: _kept(client, job.id, span)),
            )

    def action_attach(self) -> None:
        """Connect the terminal to the selected job."""
        if (job := self._chosen_started("attach to")) is not None:
            question = f"Attach to {_named(job)}? Ctrl-\\ and then d come back here."
            confirm = Confirm(question, self._terminal)
            self.push_screen(confirm, lambda yes: self._go_to(job.id) if yes else None)

    def _go_to(self, number: int) -> None:
        error: GpuleaseError | None = None
        with self.suspend():
            try:
                attach_to_job(self._client, self._client.job(number))
            except GpuleaseError as failed:
                error = failed
            except Killed as killed:
                self._end_by(killed.signum)
        if error is not None:
            (self._job or self._machine).fail(error)
        self._poller.look()

    def _chosen(self) -> JobView | None:
        """Return the job that an action is about; say so if there is none."""
        if self._job is not None:
            return self._job.job
        item: Item | None = self._machine.selected
        if isinstance(item, JobView):
            return item
        self._refuse("no job is selected")
        return None

    def _chosen_started(self, verb: str) -> JobView | None:
        """Return the job of an action that a job in the queue does not allow; say so there."""
        job = self._chosen()
        if job is None or job.state != "queued":
            return job
        self._refuse(f"cannot {verb} {ids_of([job])}: it waits in the queue")
        return None

    def _refuse(self, why: str, hint: str | None = None) -> None:
        (self._job or self._machine).say(why, hint, "warn")

    def _confirm(self, question: str, act: Act) -> None:
        confirm = Confirm(question, self._terminal)
        self.push_screen(confirm, lambda yes: self._act(act) if yes else None)

    def _ask(self, question: str, text: str, then: Callable[[str], None]) -> None:
        ask = Ask(question, text, self._terminal)
        self.push_screen(ask, lambda answer: None if answer is None else then(answer))

    def _act(self, act: Act) -> None:
        self._poller.ask(act, self._answer)

    def _answer(self, result: object, error: GpuleaseError | None) -> None:
        self._post(self.Answered(result, error))

    def _post(self, message: Message) -> None:
        """Pass a message on from another thread."""
        if self.is_running:
            self.post_message(message)

    def _filter(self, words: str) -> None:
        try:
            self._machine.filter_by(parse_filter(words))
        except GpuleaseError as error:
            self._machine.fail(error)

    def _left_job(self, _result: None) -> None:
        self._job = None
        self._machine.cover(is_covered=False)
        self._poller.open(None)

    def _end_by(self, number: int) -> None:
        self.killed = number
        self.exit()


def _has_terminal() -> bool:
    """Tell whether the terminal is there; SIGHUP does not reach each process that loses it."""
    try:
        termios.tcgetattr(0)
    except termios.error:
        return False
    return True


def _named(job: JobView) -> str:
    return f"job {id_of(job)}, {named(job)} of {clean(job.user)}"


def _extended(client: Client, job: int, span: str) -> str:
    _, seconds = read_extension([str(job), span.strip()])
    return result_of_extend(client.extend(job, seconds), local_time())


def _kept(client: Client, job: int, text: str) -> str:
    span: timedelta = parse_span(text.strip())
    view = client.keep(job, span.total_seconds())
    return result_of_keep(view, span, local_time())


def _histories(client: Client, gpus: list[str]) -> list[object]:
    """Return the last minutes of each GPU; nothing from a daemon that is too old."""
    try:
        return [client.gpu_history(uuid, since=MOST * STEP_S, points=MOST) for uuid in gpus]
    except NoSuchRoute:
        return []


def run(client: Client, every: float, terminal: Terminal, *, mouse: bool) -> int:
    """Run the view until the user leaves it, and return the exit code.

    Without the mouse a terminal selects text as usual, and movements send nothing over ssh.

    Raises:
        Killed: a signal ended it; the terminal was restored.
    """
    app = TopApp(client, every, terminal)
    app.run(mouse=mouse)
    if app.bug is not None:
        raise app.bug
    if app.killed is not None:
        raise Killed(app.killed)
    return app.return_code or 0
