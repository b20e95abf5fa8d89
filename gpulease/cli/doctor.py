"""`gpulease doctor`: what the daemon finds on this machine, and what is found in this account."""

import json as json_module
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import typer

import gpulease
from gpulease.cli.caller import trusted_environment, working_directory
from gpulease.cli.connect import reach
from gpulease.cli.options import SocketOption, named_socket, takes_its_options
from gpulease.cli.program import python_of
from gpulease.cli.prove import prove as prove_levels
from gpulease.cli.render import print_stderr, print_stdout, show_page
from gpulease.cli.resolved_options import checked_settings
from gpulease.cli.tables import Block, Hanging, Page, Span, Style
from gpulease.client import encode, has_daemon
from gpulease.cluster_choice import SLURM, cluster
from gpulease.config import candidate_sockets
from gpulease.drawing.words import clean
from gpulease.errors import (
    BadConfiguration,
    CommandNotExecutable,
    GpuleaseError,
    NoDaemon,
    NotTrusted,
)
from gpulease.light_json import indent
from gpulease.locations import environment
from gpulease.notifications.receivers import receivers_of
from gpulease.wire.machine import CheckState, CheckView, DoctorView

_HOOKS = Path(gpulease.__file__).parent / "worker" / "hooks"
_DRIVER = Path("/proc/driver/nvidia/version")
_MARKS: dict[str, tuple[str, Style]] = {
    "ok": ("ok      ", "good"),
    "warning": ("warning ", "warn"),
    "failure": ("FAILURE ", "bad"),
}
_INDENT = 8


@takes_its_options
def doctor(ctx: typer.Context, *, json: bool, prove: bool, socket: SocketOption = None) -> int:
    """Diagnose problems of this machine and this account, and suggest fixes.

    Exits with 1 if a check fails. With --prove, short jobs of yours try to use more than
    they leased, to test what enforces leases: for some minutes, and with 2G of a GPU.

    \b
    Examples:
      gpulease doctor
      gpulease doctor --prove
      gpulease doctor --json | jq '.checks[] | select(.state != "ok")'
    """
    python = Python.of_the_caller()
    view = _checks_of_the_daemon(ctx, socket)
    view.checks += [_access_check(), *_notification_checks(), *python.checks]
    if prove:
        # Some seconds; minutes where the grace of the watch passes first.
        print_stderr("gpulease: trying to exceed a lease; this may take some minutes")
        try:
            client = reach(named_socket(ctx, socket), "doctor")
            view.checks += prove_levels(client, python.frameworks, view.overuse)
        except GpuleaseError as error:
            what = f"not tested: {error.message}"
            view.checks.append(CheckView("proof", "warning", what, error.hint))
    if json:
        print_stdout(indent(encode(view)))
    else:
        show_page(page(view))
    return int(any(check.state == "failure" for check in view.checks))


def page(view: DoctorView) -> Page:
    """Lay out the checks, each with its fix below."""
    blocks: list[Block] = []
    for check in view.checks:
        mark, style = _MARKS[check.state]
        text = Span(f"{clean(check.name)}: {clean(check.message)}")
        blocks.append(Hanging((Span(mark, style), text), _INDENT))
        if check.mend:
            mend = Span(clean(check.mend), "dim")
            blocks.append(Hanging((Span(" " * _INDENT), mend), _INDENT))
    return blocks


def _checks_of_the_daemon(ctx: typer.Context, socket: Path | None) -> DoctorView:
    """Return the daemon's checks, or what can be checked without a daemon."""
    try:
        client = reach(named_socket(ctx, socket), "doctor")
        found = client.doctor()
    except NoDaemon as error:
        is_named = len(candidate_sockets(named_socket(ctx, socket))) == 1
        is_expected = is_named or has_daemon() or isinstance(error, NotTrusted)
        state: CheckState = "failure" if is_expected else "warning"
        daemon = CheckView("daemon", state, error.message, error.hint)
        is_elsewhere = is_named or cluster(environment()) == SLURM
        return DoctorView([daemon] if is_elsewhere else [daemon, _driver_check()])
    except GpuleaseError as error:
        return DoctorView([CheckView("daemon", "failure", error.message, error.hint)])
    found.checks.insert(0, CheckView("daemon", "ok", f"answers on {client.path}"))
    return found


def _driver_check() -> CheckView:
    if _DRIVER.exists():
        return CheckView("driver", "ok", "the NVIDIA driver is loaded")
    if simulated := environment().get("GPULEASE_SIMULATE"):
        return CheckView("driver", "ok", f"not needed to simulate {simulated}")
    return CheckView(
        "driver",
        "failure",
        "the NVIDIA driver is not loaded",
        "to try gpulease without a GPU, set GPULEASE_SIMULATE=2x8G",
    )


def _access_check() -> CheckView:
    if os.access(_HOOKS, os.R_OK | os.X_OK):
        return CheckView("your access", "ok", f"you can read {_HOOKS}")
    return CheckView(
        "your access",
        "failure",
        f"you cannot read {_HOOKS}, so gpulease cannot limit frameworks in your jobs",
        "install gpulease where all users can read it",
    )


def _notification_checks() -> Iterator[CheckView]:
    """Yield a check of [notify] in the user's file, if there is something in it."""
    try:
        settings = checked_settings(environment())
    except BadConfiguration as error:
        yield CheckView("notifications", "warning", error.message, error.hint)
        return
    names = ", ".join(each.name for each in receivers_of(settings))
    if names:
        yield CheckView("notifications", "ok", f"{names}; gpulease notify --test tests them")
    elif settings.events:
        why = "events are set, and no receiver"
        hint = 'add one to [notify], such as urls = ["ntfy://my-topic"]'
        yield CheckView("notifications", "warning", why, hint)


_DOCS = "docs/supported-frameworks.md lists what is limited"


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework, and how gpulease limits it."""

    name: str
    distributions: tuple[str, ...]
    """Its packages on package indexes, the usual name first."""
    limited_by: str
    oldest: tuple[int, ...] = ()
    """The oldest version that can be limited."""
    tested: tuple[str, ...] = ()
    """The minor versions that the tests run with."""
    has_prover: bool = False
    """Whether `--prove` can try to exceed a lease with it."""


FRAMEWORKS = (
    Framework(
        "tensorflow",
        ("tensorflow", "tensorflow-cpu", "tf-nightly", "tensorflow-gpu"),
        "the hook",
        oldest=(1, 13),
        tested=("1.13", "1.15", "2.4", "2.12", "2.19", "2.20", "2.21"),
        has_prover=True,
    ),
    Framework("torch", ("torch",), "the hook", tested=("2.9", "2.14"), has_prover=True),
    Framework(
        "jax",
        ("jax",),
        "the hook and an environment variable",
        tested=("0.10",),
        has_prover=True,
    ),
    Framework("jaxlib", ("jaxlib",), "the limit of jax", tested=("0.10",)),
    Framework(
        "cupy",
        ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x"),
        "an environment variable",
        tested=("14.2",),
    ),
    Framework("rmm", ("rmm-cu12", "rmm-cu13", "rmm"), "the hook", tested=("26.10",)),
    Framework("onnxruntime", ("onnxruntime-gpu",), "the hook", oldest=(1, 8), tested=("1.31",)),
    Framework("paddle", ("paddlepaddle-gpu",), "an environment variable"),
)


def framework_checks(installed: Mapping[str, str]) -> Iterator[CheckView]:
    """Yield a check for each framework among `installed`: versions by distribution."""
    found = False
    for framework in FRAMEWORKS:
        name = next((name for name in framework.distributions if name in installed), None)
        if name is not None:
            found = True
            yield _framework_check(framework, name, installed[name])
    if not found:
        yield CheckView(
            "frameworks",
            "warning",
            "this python has no framework that gpulease knows",
            "activate the environment of your jobs",
        )


def _framework_check(framework: Framework, name: str, version: str) -> CheckView:
    installed, numbers = f"{name} {version}", _numbers(version)
    if framework.oldest and numbers[: len(framework.oldest)] < framework.oldest:
        oldest = ".".join(map(str, framework.oldest))
        return CheckView(
            framework.name,
            "warning",
            f"{installed} is too old to be limited to its lease",
            f"use {name} {oldest} or later; {_DOCS}",
        )
    text = f"{installed} is limited to its lease on real GPUs by {framework.limited_by}"
    if framework.tested and ".".join(map(str, numbers[:2])) not in framework.tested:
        return CheckView(
            framework.name,
            "ok",
            f"{text}; gpulease is tested with {', '.join(framework.tested)}",
            "if the hook does not fit, a job warns at its start, and fails with --strict",
        )
    return CheckView(framework.name, "ok", text)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with: (2, 21, 0) of 2.21.0rc1."""
    numbers = []
    for part in version.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


_ANSWERS_WITHIN_S = 20.0
_ASK_VERSIONS = """
import json, sys
found = {}
try:
    from importlib import metadata
except ImportError:
    metadata = None
for name in sys.argv[1:] if metadata else ():
    try:
        found[name] = str(metadata.version(name))
    except Exception:
        pass
print(json.dumps([sys.version.split()[0], found]))
"""
"""Asks for versions without importing: TensorFlow takes seconds to import, and GPU memory."""


@dataclass(frozen=True, slots=True)
class Python:
    """The python that runs the caller's .py jobs, and the frameworks installed for it."""

    path: str
    checks: Sequence[CheckView]
    installed: Sequence[str] = ()
    """Distributions of frameworks."""

    @property
    def frameworks(self) -> list[tuple[str, str]]:
        """The frameworks that `--prove` can test, each with this python."""
        there = frozenset(self.installed)
        return [
            (each.name, self.path)
            for each in FRAMEWORKS
            if each.has_prover and there.intersection(each.distributions)
        ]

    @classmethod
    def of_the_caller(cls) -> Self:
        """Find the python that `run` would use, and ask it for versions."""
        try:
            path = python_of(Path(working_directory()), environment())
        except CommandNotExecutable as error:
            skipped = f"not checked, nor its frameworks: {error.message}"
            return cls("", [CheckView("python", "warning", skipped, error.hint)])
        except GpuleaseError as error:
            return cls("", [CheckView("python", "warning", error.message, error.hint)])
        try:
            version, installed = _ask_versions(path)
        except (OSError, subprocess.SubprocessError, ValueError, LookupError) as error:
            return cls(path, [CheckView("python", "warning", f"{path} does not work: {error}")])
        runs = CheckView("python", "ok", f".py jobs run under {path} ({version})")
        return cls(path, [runs, *framework_checks(installed)], tuple(installed))


def _ask_versions(path: str) -> tuple[str, dict[str, str]]:
    """Return the version of a python, and those of the frameworks that it has."""
    names = [name for each in FRAMEWORKS for name in each.distributions]
    asked = subprocess.run(
        [path, "-c", _ASK_VERSIONS, *names],
        env=trusted_environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=_ANSWERS_WITHIN_S,
        stdin=subprocess.DEVNULL,
        # With -c, Python imports from the working directory, which any user may have written.
        cwd="/",
    )
    version, installed = json_module.loads(asked.stdout.splitlines()[-1])
    return version, installed
