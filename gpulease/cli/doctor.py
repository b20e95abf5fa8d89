"""`gpulease doctor`: what the daemon finds wrong, and what the user's own side finds wrong."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

import gpulease
from gpulease.cli.caller import environment
from gpulease.cli.connect import SocketOption, connect, named_socket
from gpulease.cli.format import clean
from gpulease.cli.prove import prove as prove_rungs
from gpulease.cli.python_environment import Python
from gpulease.cli.render import say, screen_of, show, show_page
from gpulease.cli.tables import Block, Hanging, Page, Span, Style
from gpulease.client import NotTrusted, encode, has_daemon, indent
from gpulease.config import candidate_sockets
from gpulease.errors import GpuleaseError, NoDaemon
from gpulease.wire.views import CheckState, CheckView, DoctorView, OveruseView

_HOOKS = Path(gpulease.__file__).parent / "worker" / "hooks"
_DRIVER = Path("/proc/driver/nvidia/version")
_MARKS: dict[str, tuple[str, Style]] = {
    "ok": ("ok      ", "good"),
    "warning": ("warning ", "warn"),
    "failure": ("FAILURE ", "bad"),
}
_INDENT = 8


def doctor(
    ctx: typer.Context,
    json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False,
    prove: Annotated[
        bool,
        typer.Option("--prove", help="Try to leave a lease too, and tell what stopped it."),
    ] = False,
    socket: SocketOption = None,
) -> int:
    """Look at this machine and this account, and say how to mend what is wrong; 1 on a failure.

    With --prove jobs of yours try to take more than they leased: minutes at most, and 2G of a GPU.

    \b
    Examples:
      gpulease doctor
      gpulease doctor --prove
      gpulease doctor --json | jq '.checks[] | select(.state != "ok")'
    """
    own = Python.of_the_caller()
    view = _of_the_daemon(ctx, socket)
    view.checks += [_hooks(), *own.checks]
    if prove:
        view.checks += _proofs(ctx, socket, own, view.overuse)
    if json:
        show(indent(encode(view)))
    else:
        show_page(page(view), screen_of(sys.stdout, environment()))
    return int(any(check.state == "failure" for check in view.checks))


def page(view: DoctorView) -> Page:
    """Lay out the checks, each mend under its own."""
    return [block for check in view.checks for block in _check(check)]


def _check(check: CheckView) -> Iterator[Block]:
    mark, style = _MARKS[check.state]
    said = Span(f"{clean(check.name)}: {clean(check.message)}")
    yield Hanging((Span(mark, style), said), _INDENT)
    if check.mend:
        yield Hanging((Span(" " * _INDENT), Span(clean(check.mend), "dim")), _INDENT)


def _of_the_daemon(ctx: typer.Context, socket: Path | None) -> DoctorView:
    """Return what the daemon says, after that there is one, or what is known without it."""
    try:
        client = connect(ctx, socket)
        found = client.doctor()
    except NoDaemon as error:
        named = len(candidate_sockets(named_socket(ctx, socket))) == 1
        wrong = named or has_daemon() or isinstance(error, NotTrusted)
        state: CheckState = "failure" if wrong else "warning"
        daemon = CheckView("daemon", state, error.message, error.hint)
        return DoctorView([daemon] if named else [daemon, _driver()])
    except GpuleaseError as error:
        return DoctorView([CheckView("daemon", "failure", error.message, error.hint)])
    found.checks.insert(0, CheckView("daemon", "ok", f"it answers on {client.path}"))
    return found


def _driver() -> CheckView:
    """Look for ourselves, where there is no daemon to ask."""
    if _DRIVER.exists():
        return CheckView("driver", "ok", "the NVIDIA driver is loaded")
    if wanted := environment().get("GPULEASE_SIMULATE"):
        return CheckView("driver", "ok", f"none is needed to simulate {wanted}")
    return CheckView(
        "driver",
        "failure",
        "no NVIDIA driver is loaded here",
        "to try gpulease without a GPU, set GPULEASE_SIMULATE=2x8G",
    )


def _hooks() -> CheckView:
    if os.access(_HOOKS, os.R_OK | os.X_OK):
        return CheckView("your access", "ok", f"{_HOOKS} can be read")
    return CheckView(
        "your access",
        "failure",
        f"{_HOOKS} cannot be read, so no framework can be held to its lease",
        "install gpulease where every user may read it",
    )


def _proofs(
    ctx: typer.Context, socket: Path | None, own: Python, rule: OveruseView | None
) -> Iterator[CheckView]:
    # Seconds at the least, and minutes where the watch has to be waited for.
    say("gpulease: trying to leave a lease; this may take some minutes")
    try:
        yield from prove_rungs(connect(ctx, socket), own.frameworks, rule)
    except GpuleaseError as error:
        yield CheckView("proof", "warning", f"not tried: {error.message}", error.hint)
