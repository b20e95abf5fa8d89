"""Wire objects as a daemon would send them; a test changes what it is about."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from gpulease.units import GIB, MIB
from gpulease.wire.jobs import (
    ClaimView,
    EventView,
    ExpectedStartView,
    JobView,
    LeaseView,
    RefusalView,
)
from gpulease.wire.machine import (
    EnforcementLevelView,
    GpuEventView,
    GpuView,
    MemoryView,
    ProcessView,
    StatusView,
)

NOW = datetime(2026, 3, 2, 14, 5, tzinfo=UTC)
FIRST, SECOND = "GPU-11111111-aaaa", "GPU-22222222-bbbb"


def claim(memory: int | None = 4 * GIB, **changed: Any) -> ClaimView:
    view = ClaimView(memory=memory, share=None, gpus=1, exclusive=False, time_limit=None)
    return replace(view, **changed)


def job(number: int = 17, **changed: Any) -> JobView:
    """Return a job that waits."""
    view = JobView(
        id=number,
        name="train.py",
        user="alice",
        state="queued",
        reason="no GPU has 4G free",
        outcome=None,
        position=1,
        expected_start_at=None,
        command="python3 train.py --epochs 3",
        claim=claim(),
        leases=[],
        submitted_at="2026-03-02T14:00:00Z",
        granted_at=None,
        started_at=None,
        ended_at=None,
        expires_at=None,
        exit_status=None,
        pid=None,
        directory=None,
    )
    return replace(view, **changed)


def probably(**changed: Any) -> ExpectedStartView:
    """Return the range about a start at 17:30."""
    made = ExpectedStartView("2026-03-02T15:10:00Z", "2026-03-03T00:20:00Z", None)
    return replace(made, **changed)


def running(number: int = 12, gpu: str = FIRST, **changed: Any) -> JobView:
    """Return a job that holds 6 GiB of a GPU."""
    rungs = ["driver", "framework", "watch"]
    settled: dict[str, Any] = {
        "state": "active",
        "reason": None,
        "position": None,
        "claim": claim(6 * GIB, time_limit=14400.0),
        "leases": [LeaseView(gpu, 6 * GIB, 5 * GIB, 5 * GIB + 512 * MIB, rungs, 6 * GIB)],
        "granted_at": "2026-03-02T13:30:00Z",
        "started_at": "2026-03-02T13:30:01Z",
        "expires_at": "2026-03-02T17:30:01Z",
        "submitted_at": "2026-03-02T13:29:00Z",
        "pid": 4242,
    }
    return job(number, **(settled | changed))


def over(number: int = 17, exit_status: int | None = 0, **changed: Any) -> JobView:
    """Return a job that has ended."""
    settled: dict[str, Any] = {
        "state": "ended",
        "outcome": "exited",
        "ended_at": "2026-03-02T14:00:00Z",
        "expires_at": None,
        "exit_status": exit_status,
    }
    return running(number, **(settled | changed))


def memory(**changed: Any) -> MemoryView:
    view = MemoryView(
        total=24 * GIB,
        used=7 * GIB,
        reserved=512 * MIB,
        allocatable=24 * GIB - 512 * MIB,
        leased=6 * GIB,
        committed=6 * GIB,
        unmanaged=2 * GIB,
        headroom=15 * GIB + 512 * MIB,
    )
    return replace(view, **changed)


def gpu(index: int = 0, uuid: str = FIRST, **changed: Any) -> GpuView:
    view = GpuView(
        index=index,
        uuid=uuid,
        name="NVIDIA RTX 6000 Ada Generation",
        state="available",
        detail=None,
        memory=memory(),
        utilization=87,
        temperature=64,
        processes=[],
    )
    return replace(view, **changed)


def empty_gpu(index: int, uuid: str, **changed: Any) -> GpuView:
    free = memory(used=512 * MIB, leased=0, committed=0, unmanaged=0, headroom=23 * GIB)
    return gpu(index, uuid, **({"memory": free, "utilization": 0} | changed))


def status(**changed: Any) -> StatusView:
    """Return a quiet machine with one GPU."""
    view = StatusView(
        host="lab7",
        driver="580.65.06",
        version="0.1.0",
        simulated=False,
        at="2026-03-02T14:05:00Z",
        gpus=[empty_gpu(0, FIRST)],
        jobs=[],
    )
    return replace(view, **changed)


def busy_status() -> StatusView:
    """Return a machine on which everything that can be shown is to be seen."""
    at = "2026-03-01T12:05:00Z"
    stranger = ProcessView(
        3131,
        "bob",
        "python",
        "python notebook.py",
        2 * GIB,
        None,
        started_at=at,
        container="3f2a9c51d0e7",
    )
    ours = ProcessView(4242, "alice", "python", "python train.py", 5 * GIB, 12)
    unread = memory(
        total=None,
        used=None,
        allocatable=None,
        leased=0,
        committed=0,
        unmanaged=None,
        headroom=None,
    )
    return status(
        gpus=[
            gpu(processes=[ours, stranger]),
            empty_gpu(1, SECOND, state="drained", detail="drained by root: new cable"),
            gpu(
                2,
                "GPU-3",
                state="unreadable",
                detail="the driver does not answer",
                memory=unread,
                utilization=None,
                temperature=None,
            ),
        ],
        jobs=[running(12, name="resnet-50-with-a-rather-long-name"), waiting(), second_waiting()],
        enforcement=[
            EnforcementLevelView(
                "driver", False, "this driver has no memory limits; they come with r615"
            ),
            EnforcementLevelView("framework", True, "hooks keep honest programs in"),
            EnforcementLevelView("watch", True, "what jobs use is compared with their leases"),
            EnforcementLevelView(
                "devices", False, "a job can open every GPU: systemd does not run here"
            ),
        ],
    )


def troubled_status() -> StatusView:
    """Return a machine with a GPU that has seen faults, and one that is divided by MIG."""
    part = "MIG-5b1f0d1e-7a10-5d8a-8e4e-0d6c2b1f9a77"
    server = ProcessView(5151, "root", "nvidia-cuda-mps", "nvidia-cuda-mps-server", GIB, None, True)
    events = [
        GpuEventView("2026-03-02T13:01:00Z", "drained", "drained by bob: dust", 1),
        GpuEventView("2026-03-02T13:40:00Z", "xid 31", "XID 31, a memory page fault", 12),
        GpuEventView("2026-03-02T14:01:00Z", "xid 95", "XID 95, a memory error", 1),
        GpuEventView("2026-03-02T14:01:00Z", "faulty", "drained by gpulease: XID 95", 1),
    ]
    divided = memory(
        total=None, allocatable=None, leased=0, committed=0, unmanaged=GIB, headroom=None
    )
    return status(
        gpus=[
            gpu(
                0,
                FIRST,
                state="drained",
                detail="drained by gpulease: XID 95, a memory error",
                events=events,
                processes=[server],
            ),
            gpu(
                1,
                SECOND,
                state="divided",
                detail="divided by MIG: its MIG device is leased, not the GPU itself",
                memory=divided,
                label="1",
            ),
            empty_gpu(1, part, label="1:0", parent=SECOND, utilization=None),
        ],
        jobs=[running(12, leases=[LeaseView(part, 6 * GIB, 5 * GIB, 5 * GIB, [])])],
    )


def waiting() -> JobView:
    return job(
        17,
        user="carol",
        claim=claim(20 * GIB, gpus=2),
        reason="no 2 GPUs have 20G free",
        waits_for=[12],
        expected_start_at="2026-03-02T17:30:00Z",
        expected_start=probably(after=12),
        refusals=[
            RefusalView(FIRST, 0, "15.5G free, 20G asked"),
            RefusalView(SECOND, 1, "it is drained"),
        ],
        events=[EventView("2026-03-02T14:00:00Z", "submitted", None)],
    )


def second_waiting() -> JobView:
    asks = claim(None, share=40.0, exclusive=True)
    return job(18, user="dave", position=2, claim=asks, reason="job 17 is first", waits_for=[])
