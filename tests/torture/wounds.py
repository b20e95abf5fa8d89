"""Points in the real daemon, from outside: its own functions are wrapped, none is replaced.

Each verb that writes has a point before its commit and one after it, in the thread that writes;
verbs that are committed together have theirs one after the other.
"""

import os
import subprocess
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sqlalchemy import Engine, event

from gpulease.daemon import app
from gpulease.host import job_runner, launcher
from gpulease.service import jobs, scheduler, submission
from gpulease.store import schema, writer
from torture import points
from torture.points import cross

TESTS = Path(__file__).parents[1]
ENCLOSED = "TORTURE_ENCLOSED"
"""Set for a daemon whose shims wait for its word, as under systemd."""


class _Writing(threading.local):
    """What a thread writes."""

    verb: str | None = None
    """The verb that runs now."""

    def __init__(self) -> None:
        self.gathered: list[str] = []
        """The verbs that have ended, and are not committed yet."""


_writing = _Writing()


def install() -> None:
    """Wrap what the points are at; before the daemon is built."""
    event.listen(Engine, "commit", _before_a_migration)
    _wound_commits()
    event.listen(Engine, "after_cursor_execute", _after_a_statement)
    for name, verb in (
        ("cancel", "cancel"),
        ("revoke", "revoke"),
        ("note_notice", "notice"),
        ("note_started", "started"),
        ("note_expired", "expired"),
        ("note_main_exited", "main exited"),
        ("note_exited", "ended"),
        ("note_launch_failed", "launch failed"),
    ):
        _wound_verb(jobs, name, verb)
    _wound_verb(submission, "submit", "submit")
    _wound_verb(scheduler, "extend", "extend")
    _wound_migration()
    _wound(schema, "copy_database", "migration: before the copy", "migration: after the copy")
    _wound_grants()
    _wound_later(launcher.Launcher, "_pass_on", "launch: before it is handed on", "handed on")
    _wound_later(job_runner.shim_control, "stop", "stop: before the shim is told", "stop: told")
    _wound_later(
        job_runner.shim_control, "set_time_limit", "extend: before the shim is told", "extend: told"
    )
    _wound_spawner()
    _wound_enclosing()


def _before_a_migration(_: object) -> None:
    if _writing.verb == "migration":
        cross("migration: before its commit")


def _wound_commits() -> None:
    real = writer.Writer.commit

    def wounded(self: writer.Writer) -> None:
        verbs = [*_writing.gathered, *filter(None, [_writing.verb])]
        _writing.gathered, _writing.verb = [], None
        for verb in verbs:
            cross(f"{verb}: before its commit")
        real(self)
        for verb in verbs:
            cross(f"{verb}: after its commit")

    writer.Writer.commit = wounded


def _after_a_statement(
    _c: object, _cursor: object, statement: str, _p: object, _x: object, _m: object
) -> None:
    if _writing.verb != "migration" or "alembic_version" in statement:
        return
    if statement.lstrip().startswith(("ALTER", "CREATE")):
        cross("migration: in its middle")


def _wound(owner: Any, name: str, before: str, after: str) -> None:
    real: Callable[..., Any] = getattr(owner, name)

    def wounded(*arguments: Any, **named: Any) -> Any:
        cross(before)
        result = real(*arguments, **named)
        cross(after)
        return result

    setattr(owner, name, wounded)


def _wound_later(owner: Any, name: str, before: str, after: str) -> None:
    real: Callable[..., Any] = getattr(owner, name)

    async def wounded(*arguments: Any, **named: Any) -> Any:
        cross(before)
        result = await real(*arguments, **named)
        cross(after)
        return result

    setattr(owner, name, wounded)


def _wound_verb(owner: Any, name: str, verb: str) -> None:
    real: Callable[..., Any] = getattr(owner, name)

    def wounded(*arguments: Any, **named: Any) -> Any:
        _writing.verb = verb
        try:
            result = real(*arguments, **named)
            _gather()
        finally:
            _writing.verb = None
        return result

    setattr(owner, name, wounded)


def _gather() -> None:
    """Note the present verb for the commit of its batch, unless it has been committed."""
    if _writing.verb is not None:
        _writing.gathered.append(_writing.verb)


def _wound_migration() -> None:
    def wounded(real: Callable[..., None], *arguments: Any) -> None:
        _writing.verb = "migration"
        try:
            real(*arguments)
        finally:
            _writing.verb = None
        cross("migration: after its commit")

    schema.create = partial(wounded, schema.create)
    schema.migrate = partial(wounded, schema.migrate)


def _wound_grants() -> None:
    """Most passes grant nothing, and are no points."""
    grant, whole = scheduler.grant, scheduler.reconcile

    def granting(*arguments: Any) -> Any:
        _writing.verb = "grant"
        return grant(*arguments)

    def reconciling(*arguments: Any, **named: Any) -> Any:
        try:
            decided = whole(*arguments, **named)
            _gather()
        finally:
            _writing.verb = None
        return decided

    scheduler.grant = granting
    scheduler.reconcile = reconciling


def _wound_spawner() -> None:
    """Have the spawner be that of this folder, which crosses points in its shims."""

    def popen(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        command = [it.replace("gpulease.shim.spawner", "torture.spawner") for it in command]
        environment = dict(options.pop("env"))
        environment["PYTHONPATH"] += f":{TESTS}"
        environment[points.FOLDER] = os.environ[points.FOLDER]
        environment[points.DAEMON] = str(os.getpid())
        return subprocess.Popen(command, env=environment, **options)

    launcher.subprocess = SimpleNamespace(
        Popen=popen, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )


def _wound_enclosing() -> None:
    real = app.Launcher

    async def enclose(_pid: int, _launch: object) -> None:
        cross("launch: before the word to the shim")

    def launcher_of(**options: Any) -> launcher.Launcher:
        if ENCLOSED in os.environ:
            options["sandbox"] = enclose
        return real(**options)

    app.Launcher = launcher_of
