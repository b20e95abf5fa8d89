"""The routes for Slurm's prolog, epilog and task prolog.

Their errors are plain text: the script that asks has no JSON parser, and shows them to the user.
"""

import os
from collections.abc import Mapping

import msgspec

from gpulease.domain.job import Exit, Invocation, Job, SlurmJob
from gpulease.domain.lease import State
from gpulease.errors import BadValue, CannotLease, NoRoomNow, NotAllowed, WrongState
from gpulease.fingerprint import fingerprint_of
from gpulease.server.auth import Caller
from gpulease.server.context import HolderParts, Request, RequestContext, read_body
from gpulease.server.job_requests import shown_command
from gpulease.server.messages import PLAIN_TEXT, Response, json_response
from gpulease.server.validation import bytes_string, environment_of, options_of, within
from gpulease.slurm.allocations import SlurmRefusal
from gpulease.slurm.node.leases import SlurmLeases, SlurmRequest
from gpulease.units import numbers_in
from gpulease.wire.requests import (
    SlurmCommandRequest,
    SlurmEndRequest,
    SlurmEnvironmentRequest,
    SlurmLeaseRequest,
    WorkerOptionsRequest,
)

_GPUS = "SLURM_STEP_GPUS"
_LARGEST_NUMBER = (1 << 32) - 1
_STATUSES = 1 << 16
COMMAND_VARIABLE = "GPULEASE_SLURM"
_TASKS = "SLURM_STEP_TASKS_PER_NODE"
_MOST_DETAIL = 200


class SlurmHandlers:
    """One method for each route."""

    def __init__(
        self, context: RequestContext, leases: SlurmLeases | None, holders: HolderParts
    ) -> None:
        """`leases` is None in a personal daemon."""
        self._context = context
        self._slurm = leases
        self._holders = holders

    async def lease(self, request: Request) -> Response:
        """Lease the GPUs of a job of Slurm, before its first process starts."""
        leases = self._leases()
        # It may wait for memory that the epilog of another job frees.
        request.slot.become_stream(None)
        asked = request_of(request.read(SlurmLeaseRequest))
        try:
            job = await leases.grant(asked)
        except SlurmRefusal as refusal:
            await leases.refuse(asked, refusal)
            raise _no_lease(asked.job.id, str(refusal)) from refusal
        return json_response(self._context.job_views.job(job), 201)

    async def end(self, request: Request, number: int) -> Response:
        """End the lease of a job of Slurm, after its last process has ended."""
        request.slot.become_stream(None)
        body = request.read(SlurmEndRequest)
        job = within("job", number, 0, _LARGEST_NUMBER)
        await self._leases().end(job, exit_of(body.job_exit_code))
        return Response(status=204)

    async def environment(self, request: Request, number: int) -> Response:
        """Return what the lease of a job of Slurm changes in the environment of one of its tasks.

        The answer consists of lines for Slurm: `export NAME=VALUE` and `unset NAME`.
        """
        caller, leases = request.caller, self._leases()
        body = request.read(SlurmEnvironmentRequest)
        before = environment_of(body.environment)
        job = leases.of(number)
        if job is None:
            # In a slot of the user, since any user may ask; the hook asks again if none is free.
            job = await leases.of_task(number, caller.pid)
        if job is None:
            raise _no_lease(number, leases.why_refused(number) or "it has no lease")
        self._refuse_others(caller, job)
        command = command_in(before, number)
        if command.argv:
            argv = tuple(bytes_string("argument", each) for each in command.argv)
            fingerprint = fingerprint_of(argv, command.cwd)
            job = await leases.describe(job, shown_command(argv), fingerprint)
        job = await leases.limited(job)
        part = leases.part_of_task(job, numbers_in(before.get(_GPUS, "")), body.devices)
        invocation = invocation_of_task(command, before, len(part.leases), len(job.leases))
        after = {**self._holders.environment(part, invocation, job)}
        after.pop(COMMAND_VARIABLE, None)
        after |= bound(command, number)
        return Response(task_prolog_lines(before, after), media_type=PLAIN_TEXT)

    def _leases(self) -> SlurmLeases:
        if self._slurm is None or self._context.scheduler.policy.slurm is None:
            # No 409: the prolog would start the job, whose tasks would fail.
            raise CannotLease(
                "cannot lease for a job of Slurm: this daemon has all GPUs for its own queue",
                'set cluster = "slurm" in /etc/gpulease/config.toml on this node, then '
                "systemctl reload gpuleased",
            )
        return self._slurm

    def _refuse_others(self, caller: Caller, job: Job) -> None:
        if not self._context.rights.owns(caller, job):
            raise NotAllowed(
                f"cannot read the environment of {job.title}: it belongs to {job.owner.user}",
                "only its owner and root may",
            )
        if job.state is State.RELEASING:
            raise WrongState(f"cannot start a task of {job.title}: {job.detail}")


def _no_lease(number: int, why: str) -> NoRoomNow:
    return NoRoomNow(
        f"cannot start job {number} of Slurm on this node: {why}",
        "submit it again; --exclude=NODE keeps it away from a node",
    )


def exit_of(status: int | None) -> Exit | None:
    """Return how a job ended, from its status as wait(2) has it; None if that is unknown."""
    if status is None or not 0 <= status < _STATUSES:
        return None
    code = os.waitstatus_to_exitcode(status)
    return Exit(signal=-code) if code < 0 else Exit(code)


def request_of(asked: SlurmLeaseRequest) -> SlurmRequest:
    """Return a request for a lease. Raises: BadValue."""
    number = within("job_id", asked.job_id, 1, _LARGEST_NUMBER)
    uid = within("job_uid", asked.job_uid, 0, _LARGEST_NUMBER)
    gid = within("job_gid", asked.job_gid, 0, _LARGEST_NUMBER)
    restarts = within("job_restart_count", asked.job_restart_count, 0, _LARGEST_NUMBER)
    return SlurmRequest(SlurmJob(number, asked.node, restarts), Caller(0, uid, gid).owner)


def command_in(environment: Mapping[str, str], number: int) -> SlurmCommandRequest:
    """Return what `gpulease run` has handed to a job; nothing for one submitted otherwise.

    Raises:
        BadValue: somebody has changed it.
    """
    text = environment.get(COMMAND_VARIABLE, "{}")
    try:
        command = read_body(SlurmCommandRequest, os.fsencode(text))
    except BadValue as error:
        raise BadValue(
            f"cannot read the variable {COMMAND_VARIABLE}: {str(error.__cause__)[:_MOST_DETAIL]}",
            "gpulease run sets it; without it, the job has no options for frameworks",
        ) from error
    return command if command.job in (None, number) else SlurmCommandRequest()


def bound(command: SlurmCommandRequest, number: int) -> Mapping[str, str]:
    """Return the variable for the later steps of a job, with the options alone; none for defaults.

    It names the job, so that it has no effect in another one that inherits it.
    """
    if command.options == WorkerOptionsRequest():
        return {}
    kept = SlurmCommandRequest(options=command.options, job=number)
    return {COMMAND_VARIABLE: msgspec.json.encode(kept).decode()}


def invocation_of_task(
    command: SlurmCommandRequest, environment: Mapping[str, str], gpus: int = 1, of: int = 1
) -> Invocation:
    """Return a task as an invocation.

    The tasks of a step on this node start together, and have equal parts of the lease. If Slurm
    binds each of them to `gpus` of the lease's GPUs, which are `of`, fewer tasks share a GPU.
    """
    options = options_of(command.options)
    processes = command.options.processes or tasks_here(environment)
    if processes > 1:
        options = {**options, "processes": -(-processes * gpus // of)}
    return Invocation((), "/", environment, options=options)


def tasks_here(environment: Mapping[str, str]) -> int:
    """Return how many tasks of a step run on this node: 1 or 2 for "2(x3),1"; 1 if unknown."""
    node = environment.get("SLURM_NODEID", "")
    place = int(node) if node.isdecimal() and len(node) < 10 else 0
    for part in environment.get(_TASKS, "").split(","):
        count, _, nodes = part.partition("(x")
        repeated = nodes.rstrip(")") or "1"
        if not (count.isdecimal() and repeated.isdecimal() and len(part) < 20):
            return 1
        if place < int(repeated):
            return int(count)
        place -= int(repeated)
    return 1


def task_prolog_lines(before: Mapping[str, str], after: Mapping[str, str]) -> bytes:
    """Return the changes of an environment as Slurm reads them from a task prolog.

    A line ends a value there, so a changed variable with a line break, which only PYTHONPATH can
    have, keeps its former value.
    """
    lines = [
        f"export {name}={value}\n"
        for name, value in after.items()
        if before.get(name) != value and "\n" not in value
    ]
    lines += [f"unset {name}\n" for name in before if name not in after]
    return os.fsencode("".join(lines))
