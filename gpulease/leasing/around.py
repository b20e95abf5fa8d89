"""The lease under which this process runs already: that of its job, or of the shell around it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from gpulease import config
from gpulease.client import Client
from gpulease.errors import AlreadyLeased
from gpulease.leasing.held import LeasedGpu
from gpulease.wire import HoldRequest, NestedRequest, NestedView

_HOOK = "GPULEASE_HOOK"
_NAMES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "CUDA_MODULE_LOADING",
    "GPULEASE_JOB",
    "GPULEASE_WORKER",
    "GPULEASE_MEMORY",
    "GPULEASE_MEMORY_FRACTION",
    _HOOK,
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "CUPY_GPU_MEMORY_LIMIT",
)
"""The variables of a lease, as docs/commands.md lists them."""


@dataclass(frozen=True, slots=True)
class InForce:
    """What the environment says of a lease; the lease may be over, or another job's."""

    job: str
    gpus: tuple[LeasedGpu, ...]
    split: int


def in_force() -> InForce | None:
    """Return the lease that this process was started with; None if there is none."""
    try:
        told = json.loads(config.environment()[_HOOK])
        gpus = tuple(LeasedGpu(str(gpu["uuid"]), int(gpu["memory"])) for gpu in told["gpus"])
        return InForce(str(told["job"]), gpus, int(told["options"]["split"]))
    except (KeyError, TypeError, ValueError):
        return None


def lease_variables() -> Mapping[str, str]:
    """Return the variables of the lease that is in force in this process."""
    environment = config.environment()
    return {name: environment[name] for name in _NAMES if name in environment}


def lease_around(client: Client, request: HoldRequest) -> NestedView | None:
    """Return the lease under which this process runs, as the daemon confirms it; None: none.

    Raises:
        AlreadyLeased: it runs under one that cannot give what is asked for.
    """
    try:
        return client.nested(NestedRequest(request.environment, request.claim, request.options))
    except AlreadyLeased as error:
        hint = f"{error.hint}; or start the job with more: gpulease run --mem SIZE"
        raise AlreadyLeased(error.message, hint) from None
