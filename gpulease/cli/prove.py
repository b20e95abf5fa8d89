"""`doctor --prove`: try to exceed a lease on each level of enforcement, and report what stops it.

Each proof is an ordinary job that allocates memory until it is refused or stopped. It runs only
where the memory beyond its lease is free, so that no other job runs out.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import gpulease
from gpulease.cli.caller import this_process, trusted_environment
from gpulease.cli.request import build
from gpulease.client import Client
from gpulease.drawing.words import size
from gpulease.errors import GpuleaseError
from gpulease.options import RunOptions
from gpulease.record import replace
from gpulease.units import GIB, MIB, format_above, format_span
from gpulease.wire.frames import FrameKind
from gpulease.wire.jobs import JobView
from gpulease.wire.machine import CheckView, OveruseView, StatusView

_PROVER = Path(gpulease.__file__).parent / "worker" / "prover.py"
_LEASE = 512 * MIB
_EXCESS = 512 * MIB
"""Memory to use beyond the lease: more than a sensible tolerance."""
_FRAMEWORK_LEASE = 2 * GIB
_WAIT = "30s"
_LONGEST_GRACE_S = 120.0
"""With a longer grace, the end of the job is not awaited."""
_STAYS_S = 150.0
"""Seconds that a job stays over its lease to be stopped: that grace, and a margin."""
_SEEN_S = 3.0
"""Seconds that a job keeps its memory so that the daemon sees how much it is."""
_TIME_LIMIT = "6m"
_NODES = "/dev/nvidia[0-9]*"
_SIMULATED = "not tested: simulated GPUs have no devices, and frameworks are not limited on them"


@dataclass(slots=True)
class Trial:
    """A job that tried to exceed its lease, and what it reported."""

    job: JobView
    reports: list[dict[str, Any]] = field(default_factory=list)
    took_s: float = 0.0

    @property
    def held(self) -> int:
        """The most bytes that it held."""
        return max((line.get("held", 0) for line in self.reports), default=0)

    @property
    def peak(self) -> int:
        """The most bytes of a GPU that its processes held, with contexts; 0 if unknown."""
        return max((lease.peak or 0 for lease in self.job.leases), default=0)

    @property
    def refusal(self) -> dict[str, Any] | None:
        return next((line for line in self.reports if "refused" in line), None)

    @property
    def obstacle(self) -> str | None:
        """Why it could not try; None if it could."""
        return next((line["cannot"] for line in self.reports if "cannot" in line), None)

    @property
    def was_warned(self) -> bool:
        return any(event.kind == "notice" for event in self.job.events)


def prove(
    client: Client, frameworks: Sequence[tuple[str, str]], policy: OveruseView | None = None
) -> Iterator[CheckView]:
    """Yield what each level of enforcement did about a job that tried to exceed its lease.

    Args:
        client: of the daemon.
        frameworks: those to test, each with the python that has it.
        policy: what happens to jobs of the caller that exceed a lease; None: unknown.
    """
    status = client.status(queue=0)
    yield _tested("proof: watch", partial(_without_framework, client, status, policy))
    if status.simulated:
        yield CheckView("proof: framework, devices", "warning", _SIMULATED)
        return
    for framework, python in frameworks:
        yield _tested(f"proof: {framework}", partial(_framework, client, framework, python))
    yield _tested("proof: devices", partial(_devices, client))


def _tested(name: str, proof: Callable[[str], CheckView]) -> CheckView:
    """Return the result of a proof, which gets its name; a warning if it could not be tried."""
    try:
        return proof(name)
    except GpuleaseError as error:
        return CheckView(name, "warning", f"not tested: {error.message}", error.hint)


def _without_framework(
    client: Client, status: StatusView, policy: OveruseView | None, name: str
) -> CheckView:
    """Exceed a lease without a framework: the driver refuses the memory, or the watch reacts."""
    offered = max((gpu.memory.headroom or 0 for gpu in status.gpus), default=0)
    if offered < _LEASE + _EXCESS:
        raise GpuleaseError(
            f"it needs {size(_LEASE + _EXCESS)} of free memory on one GPU",
            "try again when less memory is leased",
        )
    way = "host" if status.simulated else "device"
    tolerated = _why_tolerated(policy)
    stays_s = _STAYS_S if tolerated is None else _SEEN_S
    arguments = [way, str(_LEASE + _EXCESS), str(stays_s)]
    long_grace = policy is not None and policy.grace > _LONGEST_GRACE_S
    trial = _try(
        client, [sys.executable, str(_PROVER), *arguments], _LEASE, end_at_warning=long_grace
    )
    if trial.obstacle is not None:
        raise GpuleaseError(trial.obstacle, _unused_libraries())
    if trial.refusal is not None:
        return refused_check("proof: driver", trial, _LEASE)
    return _watched(name, trial, tolerated, policy)


def _unused_libraries() -> str | None:
    """Return a hint if the job did not get all of LD_LIBRARY_PATH; None if it did."""
    name = "LD_LIBRARY_PATH"
    given = this_process().environment.get(name, "")
    if not given or trusted_environment().get(name) == given:
        return None
    return f"a job of root uses no directory of {name} that other users can change, of {given}"


def _why_tolerated(policy: OveruseView | None) -> tuple[str, str] | None:
    """Return why the excess has no consequences, and the setting that decides it."""
    if policy is None:
        return None
    if policy.tolerance >= _EXCESS:
        return (
            f"up to {size(policy.tolerance)} beyond a lease are tolerated",
            "the admin decides: overuse_tolerance in the settings",
        )
    if policy.elastic:
        return (
            "no job waits for that memory",
            "the admin decides: elastic in the settings",
        )
    return None


def _watched(
    name: str, trial: Trial, tolerated: tuple[str, str] | None, policy: OveruseView | None
) -> CheckView:
    excess = f"a job with {size(trial.held)} in a lease of {size(_LEASE)}"
    show = f"gpulease show {trial.job.id} has its events"
    if trial.job.outcome == "over_lease":
        return CheckView(
            name, "ok", f"{excess} was ended {trial.took_s:.0f} s after its start", show
        )
    if trial.was_warned and policy is not None and policy.stops and policy.grace > _LONGEST_GRACE_S:
        grace = format_span(timedelta(seconds=policy.grace))
        text = f"{excess} was warned; its end after {grace} (overuse_grace) was not awaited"
        return CheckView(name, "warning", text, show)
    if trial.was_warned:
        return CheckView(name, "warning", f"{excess} was warned, and not ended", show)
    if tolerated is not None:
        why, setting = tolerated
        return CheckView(name, "warning", f"{excess} was not ended: {why}", setting)
    return CheckView(name, "failure", f"{excess} was neither warned nor ended", show)


def refused_check(name: str, trial: Trial, lease: int) -> CheckView:
    """Return the result of a job whose allocation was refused: by what it held, and by the GPU."""
    assert trial.refusal is not None
    held, level, why = (trial.refusal[key] for key in ("refused", "by", "why"))
    text = f"the {level} allowed {size(held)} in a lease of {size(lease)}, then refused ({why})"
    if held > lease:
        return CheckView(name, "failure", text)
    if trial.peak <= lease:
        return CheckView(name, "ok", text)
    text += f"; its processes held {format_above(trial.peak, lease)} of the GPU"
    if level != "framework":
        return CheckView(name, "failure", text)
    # A framework limits its pool, and the rest is an estimate until jobs have shown it.
    hint = "gpulease reserves more beside the pool from the next job on: run doctor --prove again"
    return CheckView(name, "warning", text, hint)


def _framework(client: Client, framework: str, python: str, name: str) -> CheckView:
    arguments = [framework, str(_FRAMEWORK_LEASE), str(_SEEN_S)]
    trial = _try(client, [python, str(_PROVER), *arguments], _FRAMEWORK_LEASE)
    if trial.refusal is not None:
        return refused_check(name, trial, _FRAMEWORK_LEASE)
    if trial.obstacle is not None:
        raise GpuleaseError(trial.obstacle)
    return CheckView(
        name, "failure",
        f"{framework} allowed {size(trial.held)} in a lease of {size(_FRAMEWORK_LEASE)}",
        f"gpulease logs {trial.job.id} has its messages",
    )  # fmt: skip


def _devices(client: Client, name: str) -> CheckView:
    trial = _try(client, [sys.executable, str(_PROVER), "open", _NODES], _LEASE)
    opened = [line["opened"] for line in trial.reports if "opened" in line]
    closed = [line["closed"] for line in trial.reports if "closed" in line]
    leased = len(trial.job.leases)
    if len(opened) > leased:
        return CheckView(
            name, "warning", f"a job with {leased} GPU could open {', '.join(opened)}",
            "run gpuleased as a systemd service: its scopes deny access to the other GPUs",
        )  # fmt: skip
    if not closed:
        raise GpuleaseError("this machine has one GPU")
    return CheckView(name, "ok", f"a job could open {', '.join(opened)}, not {', '.join(closed)}")


def _try(
    client: Client, argv: Sequence[str], memory: int, *, end_at_warning: bool = False
) -> Trial:
    """Run one job to its end and read its reports; when interrupted, cancel it.

    With `end_at_warning` it is cancelled when it is warned for exceeding its lease.

    Raises:
        GpuleaseError: it could not run now.
    """
    options = RunOptions(
        mem=f"{memory // MIB}M", time=_TIME_LIMIT, name="doctor --prove", wait=_WAIT, detach=True
    )
    caller = replace(this_process(), environment=trusted_environment())
    job = client.submit(build(options, argv, caller))
    began: float | None = None
    try:
        for view in client.watch(job.id):
            job = view
            if began is None and view.state == "active":
                began = time.monotonic()
            if _is_warned(view, end_at_warning=end_at_warning):
                client.cancel(job.id, grace=1.0)
    except BaseException:
        client.cancel(job.id, grace=1.0)
        raise
    took_s = time.monotonic() - (began or time.monotonic())
    trial = Trial(client.job(job.id), list(_reports(client, job.id)), took_s)
    if job.outcome in ("gave_up", "launch_failed") or not (trial.reports or trial.was_warned):
        raise GpuleaseError(job.reason or "its job reported nothing")
    return trial


def _is_warned(job: JobView, *, end_at_warning: bool) -> bool:
    """Return whether a job is over its lease and will not be stopped, or not soon."""
    return job.state == "active" and any(
        lease.over_since_at is not None and (end_at_warning or lease.stops_at is None)
        for lease in job.leases
    )


def _reports(client: Client, job: int) -> Iterator[dict[str, Any]]:
    pieces = client.logs(job, stderr=False)
    text = b"".join(piece for kind, piece in pieces if kind == FrameKind.STDOUT)
    for line in text.decode(errors="replace").splitlines():
        try:
            report = json.loads(line)
        except ValueError:
            continue
        if isinstance(report, dict):
            yield report
