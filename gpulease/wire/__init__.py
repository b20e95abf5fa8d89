"""The JSON shapes that the daemon and its clients share.

Plain dataclasses, so that the daemon can describe them in its OpenAPI document and the command can
read them without paying for what the daemon needs. Sizes are bytes, spans seconds, instants ISO
8601 in UTC, unknown is null. Arguments, paths and environments of jobs are bytes to the kernel:
they travel *one character per byte* (Latin-1), see `to_wire` and `from_wire`.
"""

from gpulease.wire.requests import (
    API_PREFIX,
    LARGEST_REQUEST,
    CancelRequest,
    ClaimRequest,
    EarlySignalRequest,
    ExtendRequest,
    HoldRequest,
    KeepRequest,
    SubmitRequest,
    TerminalRequest,
    WorkerOptionsRequest,
)
from gpulease.wire.text import from_wire, spoken, to_wire
from gpulease.wire.views import (
    CheckState,
    CheckView,
    ClaimView,
    DoctorView,
    EnvironmentView,
    ErrorBody,
    ErrorReply,
    EventView,
    GpuState,
    GpuView,
    JobKind,
    JobList,
    JobState,
    JobView,
    LeaseView,
    MemoryView,
    Outcome,
    ProcessView,
    RefusalView,
    StatusView,
)

__all__ = [
    "API_PREFIX",
    "LARGEST_REQUEST",
    "CancelRequest",
    "CheckState",
    "CheckView",
    "ClaimRequest",
    "ClaimView",
    "DoctorView",
    "EarlySignalRequest",
    "EnvironmentView",
    "ErrorBody",
    "ErrorReply",
    "EventView",
    "ExtendRequest",
    "GpuState",
    "GpuView",
    "HoldRequest",
    "JobKind",
    "JobList",
    "JobState",
    "JobView",
    "KeepRequest",
    "LeaseView",
    "MemoryView",
    "Outcome",
    "ProcessView",
    "RefusalView",
    "StatusView",
    "SubmitRequest",
    "TerminalRequest",
    "WorkerOptionsRequest",
    "from_wire",
    "spoken",
    "to_wire",
]
