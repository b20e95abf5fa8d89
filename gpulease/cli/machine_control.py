"""Open and close GPUs and the queue: drain, resume, pause, unpause, reserve."""

from __future__ import annotations

from gpulease.cli.job_selection import for_each
from gpulease.cli.light_connection import light_client
from gpulease.cli.render import local_time, print_stdout
from gpulease.cli.request import ReserveRequest
from gpulease.drawing.words import clean, index_of
from gpulease.errors import BadUsage, BadValue

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from gpulease.client.light_client import LightClient
    from gpulease.wire.machine import GpuAvailabilityView


def drain_gpus(*, gpus: Sequence[str], why: str | None, socket: Path | str | None) -> int:
    """Stop granting leases on GPUs, and return the exit code."""
    client = light_client(socket, "drain")
    return _for_gpus(client, gpus, lambda gpu: _drained(client.drain(gpu, why=why), why))


def resume(*, gpus: Sequence[str] | None, socket: Path | str | None) -> int:
    """Grant leases on GPUs again, without GPUs start jobs again; return the exit code."""
    client = light_client(socket, "resume")
    if not gpus:
        is_paused = client.unpause().changed
        drained = "; to open a drained GPU, name it: gpulease resume 1"
        print_stdout("jobs start again" if is_paused else f"the queue was not paused{drained}")
        return 0
    return _for_gpus(client, gpus, lambda gpu: _resumed(client.resume(gpu)))


def _for_gpus(client: LightClient, gpus: Sequence[str], act: Callable[[str], str]) -> int:
    if "" in gpus:
        raise BadUsage("the name of a GPU is empty", "gpulease status lists the GPUs")
    unknown, known = split_by_known(client, gpus)
    for name in unknown:
        print_stdout(act(name))
    return for_each(known, act)


def split_by_known(client: LightClient, gpus: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the names that no GPU of `status` has, and the others.

    The unknown ones are tried first: when the daemon refuses one, nothing has been done yet.
    """
    present = [(index_of(gpu), gpu.uuid.lower()) for gpu in client.status(queue=0).gpus]
    unknown: list[str] = []
    known: list[str] = []
    for name in dict.fromkeys(gpus):
        found = [gpu for gpu in present if name == gpu[0] or gpu[1].startswith(name.lower())]
        (known if len(found) == 1 else unknown).append(name)
    return unknown, known


def _drained(view: GpuAvailabilityView, why: str | None = None) -> str:
    state = clean(view.drained or "drained")
    if view.changed:
        return f"GPU {view.label} is {state}; {_running(view.jobs)}"
    already = f"GPU {view.label} was already {state}"
    if why is None or clean(why) in state:
        return already
    return f"{already}; to change the reason, run gpulease resume {view.label} first"


def _running(jobs: list[int]) -> str:
    match jobs:
        case []:
            return "no job runs there"
        case [job]:
            return f"job {job} continues there"
        case _:
            return f"jobs {', '.join(map(str, jobs))} continue there"


def _resumed(view: GpuAvailabilityView) -> str:
    if not view.changed:
        return f"GPU {view.label} was not drained"
    return f"GPU {view.label} takes leases again"


def pause_queue(*, why: str | None, socket: Path | str | None) -> None:
    """Start no more jobs."""
    view = light_client(socket, "pause").pause(why=why)
    reason = f": {clean(view.paused.why)}" if view.paused and view.paused.why else ""
    state = "is" if view.changed else "was already"
    print_stdout(f"the queue {state} paused{reason}; running jobs continue")


def unpause_queue(*, socket: Path | str | None) -> None:
    """Start jobs again."""
    view = light_client(socket, "unpause").unpause()
    print_stdout("jobs start again" if view.changed else "the queue was not paused")


def reserve_gpus(  # noqa: PLR0913  its options
    *,
    gpus: str | None,
    gpu: Sequence[str] | None,
    begin: str | None,
    span: str | None,
    every: str | None,
    user: Sequence[str] | None,
    group: Sequence[str] | None,
    lift_limits: bool,
    name: str | None,
    cancel: str | None,
    shows: bool,
    json: bool,
    socket: Path | str | None,
) -> None:
    """Set GPUs apart for a time, remove such a window, or show all."""
    wanted = (gpus, gpu, begin, span, every, user, group, name, lift_limits or None)
    is_new = any(each is not None for each in wanted)
    if (shows or json) + is_new + (cancel is not None) > 1:
        raise BadValue(
            "cannot reserve: --list, --json and --cancel exclude the other options",
            "use one at a time; gpulease reserve alone shows all windows",
        )
    client = light_client(socket, "reserve")
    if cancel == "":
        raise BadUsage("the name of a window is empty", "gpulease reserve lists the windows")
    if cancel is not None:
        print_stdout(f"window {clean(client.cancel_window(cancel).name)} is cancelled")
    elif not is_new:
        _show(client, json=json)
    elif span is None:
        raise BadValue("cannot reserve: it has no end", "say how long with --for 12h")
    else:
        from datetime import UTC

        from gpulease.cli.window_page import sentence
        from gpulease.units import parse_instant, parse_span

        now = local_time()
        request = ReserveRequest(
            lasts_for=parse_span(span).total_seconds(),
            begins_at=begin and parse_instant(begin, now).astimezone(UTC).isoformat(),
            cron=every,
            gpus=_count(gpus, gpu),
            named=list(gpu or ()),
            users=list(user or ()),
            groups=list(group or ()),
            name=name,
            lifts_limits=lift_limits,
        )
        print_stdout(f"reserved: {sentence(client.reserve(request), now)}")


def _count(gpus: str | None, named: Sequence[str] | None) -> int | None:
    """Return the number of GPUs; None for named ones, and for all."""
    if (gpus is None) != bool(named):
        raise BadValue(
            "cannot reserve: give either --gpus or --gpu",
            "--gpus 2 for any two, --gpus all, or --gpu 0 --gpu 1 for particular ones",
        )
    if gpus is None or gpus == "all":
        return None
    if not gpus.isdecimal() or len(gpus) > len("1024"):
        raise BadValue(f"cannot reserve {gpus[:40]!r} GPUs", "write --gpus 2 or --gpus all")
    return int(gpus)


def _show(client: LightClient, *, json: bool) -> None:
    reply = client.windows_json()
    if json:
        from gpulease.light_json import indent

        print_stdout(indent(reply))
        return
    from gpulease.cli.render import show_page
    from gpulease.cli.window_page import page
    from gpulease.client.light_client import read

    show_page(page(read(reply), local_time()))
