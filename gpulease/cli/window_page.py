"""Windows, as `gpulease reserve` and `gpulease status` print them."""

from __future__ import annotations

from gpulease.cli.tables import Column, Line, Page, Table, line
from gpulease.drawing.words import UNKNOWN, clean, clock
from gpulease.units import counted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from datetime import datetime

    from gpulease.wire.machine import WindowList, WindowView


def page(view: WindowList, now: datetime) -> Page:
    """Lay out the windows."""
    if not view.windows:
        return [line("no windows: no GPU is reserved for a time", "dim")]
    columns = (
        Column("NAME", wraps=True),
        Column("STATE", leaves=3, below=""),
        Column("FROM", right=True),
        Column("UNTIL", right=True, leaves=2, below="until "),
        Column("GPUS", right=True, leaves=1, below="GPUs "),
        Column("FOR", wraps=True),
        Column("EVERY", leaves=4, below="every "),
        Column("BY", leaves=5, below="by "),
    )
    return [
        Table(columns, tuple(_row(window, now) for window in view.windows)),
        *(
            line(f"window {clean(window.name)}: {_still_there(window)}", "warn")
            for window in view.windows
            if window.other_jobs
        ),
    ]


def _row(window: WindowView, now: datetime) -> tuple[Line, ...]:
    return (
        line(clean(window.name)),
        line("on", "warn") if window.is_on else line("next" if window.cron else "planned"),
        line(clock(window.begins_at, now)),
        line(clock(window.ends_at, now)),
        line(_gpus(window)),
        line(_reserved_for(window)),
        line(window.cron or ""),
        line(clean(window.created_by)),
    )


def sentence(window: WindowView, now: datetime) -> str:
    """Describe a window in one line."""
    what = f"window {clean(window.name)}, {_number(window)} for {_reserved_for(window)}"
    if window.is_on:
        when = f"until {clock(window.ends_at, now)}"
    else:
        when = f"from {clock(window.begins_at, now)} to {clock(window.ends_at, now)}"
    again = f", every {window.cron}" if window.cron else ""
    others = f"; {_still_there(window)}" if window.other_jobs else ""
    return f"{what}, {when}{again}{others}"


def _number(window: WindowView) -> str:
    if window.named or (window.is_on and window.labels):
        return f"{'GPU' if window.gpus == 1 else 'GPUs'} {_gpus(window)}"
    return counted(window.gpus, "GPU")


def _gpus(window: WindowView) -> str:
    if window.named or window.is_on:
        return ", ".join(map(clean, window.labels)) or UNKNOWN
    return f"any {window.gpus}"


def _reserved_for(window: WindowView) -> str:
    names = [*window.users, *(f"group {group}" for group in window.groups)]
    free = " (no limits)" if window.lifts_limits else ""
    return f"{clean(', '.join(names)) or 'no one'}{free}"


def _still_there(window: WindowView) -> str:
    jobs = ", ".join(map(str, window.other_jobs))
    return (
        f"job {jobs} of another user still runs there"
        if len(window.other_jobs) == 1
        else f"jobs {jobs} of other users still run there"
    )
