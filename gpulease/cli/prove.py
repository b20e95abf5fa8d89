"""What `doctor --prove` does: try to leave a lease on each rung, and tell what stopped it.

Each proof is a job like any other, which takes memory until somebody keeps it back. The room that
it would take beyond its lease is looked for first, so that nobody else runs out of it.
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import gpulease
from gpulease.cli.caller import this_process, trusted_environment
from gpulease.cli.format import size
from gpulease.cli.request import RunOptions, build
from gpulease.client import Client
from gpulease.errors import GpuleaseError
from gpulease.units import GIB, MIB, format_span
from gpulease.wire.frames import FrameKind
from gpulease.wire.views import CheckState, CheckView, JobView, OveruseView, StatusView

_PROVER = Path(gpulease.__file__).parent / "worker" / "prover.py"
_LEASE = 512 * MIB
_EXCESS = 512 * MIB
"""So much beyond the lease is tried: more than any tolerance that lets leases mean something."""
_FRAMEWORK_LEASE = 2 * GIB
_WAITS = "30s"
_LONGEST_GRACE_S = 120.0
"""Of a longer one the end is not waited for."""
_STAYS_S = 150.0
"""How long what went too far waits to be stopped: such a grace and something."""
_LONGEST = "6m"
_NODES = "/dev/nvidia[0-9]*"
_NOT_REAL = "not tried: on simulated GPUs no framework is limited, and there are no devices"


@dataclass(slots=True)
class _Trial:
    """What came of one job that tried to leave its lease."""

    job: JobView
    said: list[dict[str, Any]] = field(default_factory=list)
    took_s: float = 0.0

    @property
    def held(self) -> int:
        """The most bytes that it said it had."""
        return max((line.get("held", 0) for line in self.said), default=0)

    @property
    def refusal(self) -> dict[str, Any] | None:
        return next((line for line in self.said if "refused" in line), None)

    @property
    def obstacle(self) -> str | None:
        """Why it could not even try; None if it could."""
        return next((line["cannot"] for line in self.said if "cannot" in line), None)

    @property
    def was_told(self) -> bool:
        return any(event.kind == "notice" for event in self.job.events)


def prove(
    client: Client, frameworks: Sequence[tuple[str, str]], rule: OveruseView | None = None
) -> Iterator[CheckView]:
    """Yield what each rung did about a job that tried to leave its lease.

    `frameworks` are those to be tried, each with the Python that has it. `rule` says what the
    admin lets jobs of the caller do; None: the daemon does not say.
    """
    status = client.status()
    yield _from_outside(client, status, rule)
    if status.simulated:
        yield CheckView("proof: framework, devices", "warning", _NOT_REAL)
        return
    for framework, python in frameworks:
        yield _framework(client, framework, python)
    yield _devices(client)


def _from_outside(client: Client, status: StatusView, rule: OveruseView | None) -> CheckView:
    """Take more than was leased without any framework: the driver's rung, or else the watch's."""
    name = "proof: watch"
    offered = max((gpu.memory.headroom or 0 for gpu in status.gpus), default=0)
    if offered < _LEASE + _EXCESS:
        return CheckView(
            name, "warning",
            f"not tried: no GPU has {size(_LEASE + _EXCESS)} free, and nobody shall run out for it",
            "try again when less is leased",
        )  # fmt: skip
    way = "host" if status.simulated else "device"
    let_be = _why_it_is_let_be(rule)
    stays_s = _STAYS_S if let_be is None else 0.0
    arguments = [way, str(_LEASE + _EXCESS), str(stays_s)]
    late = rule is not None and rule.grace > _LONGEST_GRACE_S
    try:
        trial = _try(client, [sys.executable, str(_PROVER), *arguments], _LEASE, told_is_all=late)
    except GpuleaseError as error:
        return CheckView(name, "warning", f"not tried: {error.message}", error.hint)
    if trial.obstacle is not None:
        return CheckView(name, "warning", f"could not try: {trial.obstacle}")
    if trial.refusal is not None:
        return _refused("proof: driver", trial, _LEASE)
    return _watched(name, trial, let_be, rule)


def _why_it_is_let_be(rule: OveruseView | None) -> tuple[str, str] | None:
    """Return why so much beyond a lease has no consequence, and what would change that."""
    if rule is None:
        return None
    if rule.tolerance >= _EXCESS:
        return (
            f"up to {size(rule.tolerance)} beyond a lease are let be",
            "that is the admin's wish: overuse_tolerance in the settings",
        )
    if rule.elastic:
        return (
            "nobody waits for that memory",
            "that is the admin's wish: elastic in the settings; who waits for it gets it",
        )
    return None


def _watched(
    name: str, trial: _Trial, let_be: tuple[str, str] | None, rule: OveruseView | None
) -> CheckView:
    far = f"{size(trial.held)} in a lease of {size(_LEASE)}"
    show = f"gpulease show {trial.job.id} tells what happened"
    if trial.job.outcome == "over_lease":
        return CheckView(
            name, "ok", f"{far} was noticed and ended, {trial.took_s:.0f} s after its start", show
        )
    if trial.was_told and rule is not None and rule.stops and rule.grace > _LONGEST_GRACE_S:
        long = format_span(timedelta(seconds=rule.grace))
        said = f"{far} was told to its owner; its end after {long} (overuse_grace) was not awaited"
        return CheckView(name, "warning", said, show)
    if trial.was_told:
        return CheckView(name, "warning", f"{far} was told to its owner and not ended", show)
    if let_be is not None:
        return CheckView(name, "warning", f"{far} is not stopped: {let_be[0]}", let_be[1])
    return CheckView(name, "failure", f"{far} was minded by nobody", show)


def _refused(name: str, trial: _Trial, lease: int) -> CheckView:
    assert trial.refusal is not None
    held, who, why = (trial.refusal[key] for key in ("refused", "by", "why"))
    state: CheckState = "ok" if held <= lease else "failure"
    said = f"the {who} gave {size(held)} in a lease of {size(lease)} and refused more ({why})"
    return CheckView(name, state, said)


def _framework(client: Client, framework: str, python: str) -> CheckView:
    name = f"proof: {framework}"
    arguments = [framework, str(_FRAMEWORK_LEASE), "0"]
    try:
        trial = _try(client, [python, str(_PROVER), *arguments], _FRAMEWORK_LEASE)
    except GpuleaseError as error:
        return CheckView(name, "warning", f"not tried: {error.message}", error.hint)
    if trial.refusal is not None:
        return _refused(name, trial, _FRAMEWORK_LEASE)
    if trial.obstacle is not None:
        return CheckView(name, "warning", f"could not try: {trial.obstacle}")
    return CheckView(
        name, "failure",
        f"{size(trial.held)} in a lease of {size(_FRAMEWORK_LEASE)} was given and not refused",
        f"gpulease logs {trial.job.id} tells what {framework} said",
    )  # fmt: skip


def _devices(client: Client) -> CheckView:
    name = "proof: devices"
    try:
        trial = _try(client, [sys.executable, str(_PROVER), "open", _NODES], _LEASE)
    except GpuleaseError as error:
        return CheckView(name, "warning", f"not tried: {error.message}", error.hint)
    opened = [line["opened"] for line in trial.said if "opened" in line]
    closed = [line["closed"] for line in trial.said if "closed" in line]
    leased = len(trial.job.leases)
    if len(opened) > leased:
        return CheckView(
            name, "warning", f"a job with {leased} GPU could open {', '.join(opened)}",
            "run gpuleased as a service of systemd: its scopes close the other GPUs",
        )  # fmt: skip
    if not closed:
        return CheckView(name, "warning", "could not try: there is no second GPU to be kept from")
    return CheckView(name, "ok", f"a job could open {', '.join(opened)}, not {', '.join(closed)}")


def _try(client: Client, argv: Sequence[str], memory: int, *, told_is_all: bool = False) -> _Trial:
    """Run one job to its end and read what it said; interrupted, it is cancelled.

    With `told_is_all` it goes as soon as its owner was told that it is over its lease.

    Raises:
        GpuleaseError: it could not be run now.
    """
    options = RunOptions(
        mem=f"{memory // MIB}M", time=_LONGEST, name="doctor --prove", wait=_WAITS, detach=True
    )
    caller = replace(this_process(), environment=trusted_environment())
    job = client.submit(build(options, argv, caller))
    began: float | None = None
    try:
        for view in client.watch(job.id):
            job = view
            if began is None and view.state == "active":
                began = time.monotonic()
            if _is_told(view, told_is_all=told_is_all):
                client.cancel(job.id, grace=1.0)
    except BaseException:
        client.cancel(job.id, grace=1.0)
        raise
    took_s = time.monotonic() - (began or time.monotonic())
    trial = _Trial(client.job(job.id), list(_said(client, job.id)), took_s)
    if job.outcome in ("gave_up", "launch_failed") or not (trial.said or trial.was_told):
        raise GpuleaseError(job.reason or "its job said nothing")
    return trial


def _is_told(job: JobView, *, told_is_all: bool) -> bool:
    """Tell whether a job is over its lease, and there is no stop of it to be waited for."""
    return job.state == "active" and any(
        lease.over_since_at is not None and (told_is_all or lease.stops_at is None)
        for lease in job.leases
    )


def _said(client: Client, job: int) -> Iterator[dict[str, Any]]:
    pieces = client.logs(job, stderr=False)
    text = b"".join(piece for kind, piece in pieces if kind is FrameKind.STDOUT)
    for line in text.decode(errors="replace").splitlines():
        try:
            said = json.loads(line)
        except ValueError:
            continue
        if isinstance(said, dict):
            yield said
