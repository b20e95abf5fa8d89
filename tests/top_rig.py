"""Someone who uses `gpulease top` on a real daemon, through Textual's own pilot."""

import asyncio
import re
from collections.abc import Awaitable, Callable

from textual.pilot import Pilot
from textual.widgets import Static

from daemon_rig import PATIENCE_S, Daemon
from gpulease.cli.top.app import TopApp
from gpulease.cli.top.lines import Lines, Terminal

EVERY_S = 0.3

Script = Callable[["User"], Awaitable[None]]


class User:
    """Someone who presses keys, and waits for what is shown then."""

    def __init__(self, app: TopApp, pilot: Pilot[None]) -> None:
        self.app = app
        self.pilot = pilot

    @property
    def screen(self) -> str:
        shown = []
        for widget in self.app.screen.query():
            if isinstance(widget, Lines) and widget.display:
                shown += widget.lines
            elif isinstance(widget, Static):
                shown.append(str(widget.render()))
        return "\n".join(shown)

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)

    async def type(self, text: str) -> None:
        names = {" ": "space", "+": "plus", "=": "equals_sign", "-": "minus"}
        await self.pilot.press(*(names.get(char, char) for char in text))

    async def until(self, *texts: str, gone: str = "\0") -> None:
        """Wait until all texts are shown, and `gone` is not."""
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        while not all(text in self.screen for text in texts) or gone in self.screen:
            assert asyncio.get_running_loop().time() < deadline, f"{texts}\n{self.screen}"
            await self.pilot.pause(0.05)

    async def matches(self, pattern: str) -> None:
        """Wait until a pattern is on the screen."""
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        while not re.search(pattern, self.screen):
            assert asyncio.get_running_loop().time() < deadline, f"{pattern}\n{self.screen}"
            await self.pilot.pause(0.05)


def use(daemon: Daemon, script: Script, size: tuple[int, int] = (80, 24)) -> TopApp:
    """Run the view with a user."""
    app = TopApp(daemon.client, EVERY_S, Terminal(colour=True, utf8=True))

    async def run() -> None:
        async with app.run_test(size=size) as pilot:
            await script(User(app, pilot))

    asyncio.run(run())
    assert app.bug is None
    return app


def started(daemon: Daemon, *arguments: str) -> int:
    job = daemon.submit(*arguments)
    daemon.wait_until(job, "active")
    return job
