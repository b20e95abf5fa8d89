"""Points in the real daemon, from outside: its own functions are wrapped, none is replaced.

Each verb that writes has a point before its commit (by an event of SQLAlchemy's, in the thread that
writes) and one after it.
"""

import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sqlalchemy import Engine, event

from gpulease.daemon import app
from gpulease.host import job_runner, launcher
from gpulease.service import jobs, scheduler, submission
from gpulease.store import schema
from torture import points
from torture.points import cross

TESTS = Path(__file__).parents[1]
ENCLOSED = "TORTURE_ENCLOSED"
"""Set for a daemon whose shims wait for its word, as under systemd."""

_writing = threading.local()


def install() -> None:
    """Wrap what the points are at; before the daemon is built."""
    event.listen(Engine, "commit", _before_a_commit)
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
    _wound_verb(schema, "migrate", "migration")
    _wound(schema, "copy_database", "migration: before the copy", "migration: after the copy")
    _wound_grants()
    _wound_later(launcher.Launcher, "_pass_on", "launch: before it is handed on", "handed on")
    _wound_later(job_runner.shim_control, "stop", "stop: before the shim is told", "stop: told")
    _wound_later(
        job_runner.shim_control, "set_time_limit", "extend: before the shim is told", "extend: told"
    )
    _wound_spawner()
    _wound_enclosing()


def _before_a_commit(_: object) -> None:
    verb = getattr(_writing, "verb", None)
    if verb is not None:
        cross(f"{verb}: before its commit")


def _after_a_statement(
    _c: object, _cursor: object, statement: str, _p: object, _x: object, _m: object
) -> None:
    if getattr(_writing, "verb", None) != "migration" or "alembic_version" in statement:
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
        finally:
            _writing.verb = None
        cross(f"{verb}: after its commit")
        return result

    setattr(owner, name, wounded)


def _wound_grants() -> None:
    """Most passes grant nothing, and are no points."""
    grant, whole = scheduler._grant, scheduler.reconcile

    def granting(*arguments: Any) -> None:
        grant(*arguments)
        _writing.verb = "grant"

    def reconciling(*arguments: Any, **named: Any) -> Any:
        try:
            decided = whole(*arguments, **named)
        finally:
            _writing.verb = None
        if decided.grants and named.get("fresh", True):
            cross("grant: after its commit")
        return decided

    scheduler._grant = granting
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
