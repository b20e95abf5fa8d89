"""The JSON shapes and the frames that the daemon and its clients exchange.

Programs that use `gpulease.Client` import the shapes from here. Each is loaded when it is first
used: the shim imports `gpulease.wire.frames` and must stay small.
"""

TYPE_CHECKING = False  # `typing` takes as long to import as the interpreter to start
if TYPE_CHECKING:
    from typing import Any

    from gpulease.wire.frames import FrameKind as FrameKind
    from gpulease.wire.jobs import ClaimView as ClaimView
    from gpulease.wire.jobs import EnvironmentView as EnvironmentView
    from gpulease.wire.jobs import EventView as EventView
    from gpulease.wire.jobs import JobKind as JobKind
    from gpulease.wire.jobs import JobList as JobList
    from gpulease.wire.jobs import JobState as JobState
    from gpulease.wire.jobs import JobView as JobView
    from gpulease.wire.jobs import LeaseView as LeaseView
    from gpulease.wire.jobs import NestedView as NestedView
    from gpulease.wire.jobs import Outcome as Outcome
    from gpulease.wire.jobs import PoolView as PoolView
    from gpulease.wire.jobs import QueueView as QueueView
    from gpulease.wire.jobs import RefusalView as RefusalView
    from gpulease.wire.jobs import UnheldView as UnheldView
    from gpulease.wire.machine import CheckState as CheckState
    from gpulease.wire.machine import CheckView as CheckView
    from gpulease.wire.machine import DoctorView as DoctorView
    from gpulease.wire.machine import EnforcementLevelView as EnforcementLevelView
    from gpulease.wire.machine import GpuAvailabilityView as GpuAvailabilityView
    from gpulease.wire.machine import GpuEventView as GpuEventView
    from gpulease.wire.machine import GpuState as GpuState
    from gpulease.wire.machine import GpuView as GpuView
    from gpulease.wire.machine import MemoryView as MemoryView
    from gpulease.wire.machine import OveruseView as OveruseView
    from gpulease.wire.machine import ProcessView as ProcessView
    from gpulease.wire.machine import StatusView as StatusView
    from gpulease.wire.requests import CancelRequest as CancelRequest
    from gpulease.wire.requests import ClaimRequest as ClaimRequest
    from gpulease.wire.requests import DrainRequest as DrainRequest
    from gpulease.wire.requests import EarlySignalRequest as EarlySignalRequest
    from gpulease.wire.requests import ErrorBody as ErrorBody
    from gpulease.wire.requests import ErrorReply as ErrorReply
    from gpulease.wire.requests import ExtendRequest as ExtendRequest
    from gpulease.wire.requests import HoldRequest as HoldRequest
    from gpulease.wire.requests import KeepRequest as KeepRequest
    from gpulease.wire.requests import NestedRequest as NestedRequest
    from gpulease.wire.requests import PoolUsage as PoolUsage
    from gpulease.wire.requests import QueueRequest as QueueRequest
    from gpulease.wire.requests import SubmitRequest as SubmitRequest
    from gpulease.wire.requests import TerminalRequest as TerminalRequest
    from gpulease.wire.requests import UsageRequest as UsageRequest
    from gpulease.wire.requests import WorkerOptionsRequest as WorkerOptionsRequest
    from gpulease.wire.requests import from_wire as from_wire
    from gpulease.wire.requests import to_wire as to_wire
    from gpulease.wire.usage import ReportView as ReportView
    from gpulease.wire.usage import UseView as UseView

_MODULES = ("requests", "jobs", "machine", "usage", "frames")

if not TYPE_CHECKING:  # for type checkers, every name would exist

    def __getattr__(name: str) -> "Any":
        """Load a public name when it is first used."""
        from importlib import import_module

        for module in _MODULES if not name.startswith("_") else ():
            found = getattr(import_module(f"gpulease.wire.{module}"), name, None)
            if found is not None:
                globals()[name] = found
                return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
