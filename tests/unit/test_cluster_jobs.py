"""Jobs and nodes of Slurm as `status`, `list` and `show` see them."""

from datetime import UTC, datetime
from typing import Any

import pytest

from gpulease.slurm.annotations import GpuSummary, NodeSummary, Note, encode, nodes_in, with_note
from gpulease.slurm.command.jobs import elements, label_of, span_seconds, uses_gpus, view
from gpulease.slurm.command.views import nodes_of, views_of
from gpulease.units import GIB, MIB

NOW = datetime(2026, 3, 2, 14, 0, tzinfo=UTC)
SHARD = 256 * MIB


def job(**changes: str) -> dict[str, str]:
    """Return the fields of a running job, as squeue prints them."""
    fields = {
        "jobid": "17", "arrayjobid": "17", "name": "train", "username": "alice",
        "state": "RUNNING", "reason": "None", "tres-per-node": "gres:shard:16", "nodelist": "n1",
        "submittime": "2026-03-02T13:00:00", "starttime": "2026-03-02T13:30:00",
        "endtime": "2026-03-02T15:30:00", "timelimit": "2:00:00", "exit_code": "0",
        "restartcnt": "0", "batchflag": "1", "partition": "main",
    }  # fmt: skip
    return fields | {name.replace("_per_", "-per-"): text for name, text in changes.items()}


def test_gpus_of_several_types_are_all_shown() -> None:
    shown = view(job(), SHARD, {"n1": "gpu:mem8g:1(IDX:0),gpu:mem24g:2(IDX:1-2)"})
    assert [it.gpu for it in shown.leases] == ["0,1-2"]


def test_the_gpu_of_another_node_is_not_that_of_the_job() -> None:
    shown = view(job(nodelist="n10"), SHARD, {"n1": "shard:16(IDX:1)"})
    assert [(it.node, it.gpu) for it in shown.leases] == [("n10", None)]


@pytest.mark.parametrize("per_task", ["gres:gpu:1", "gres/gpu=1"])
def test_gpus_of_tasks_are_those_of_the_job_unless_it_has_a_number(per_task: str) -> None:
    asked = {"numtasks": "4", "numnodes": "2", "tres-per-task": per_task}
    assert view(job(tres_per_node="gres:gpu:3", **asked), SHARD).claim.gpus == 3
    assert view(job(tres_per_node="", **asked), SHARD).claim.gpus == 2


def test_only_jobs_that_ask_for_gpus_use_them() -> None:
    assert uses_gpus(job())
    assert uses_gpus(job(tres_per_node="", **{"tres-per-task": "gres/gpu:1"}))
    assert not uses_gpus(job(tres_per_node=""))


@pytest.mark.parametrize(
    ("state", "exit_code", "outcome", "status"),
    [
        ("FAILED", "768", "exited", 3),
        ("FAILED", "0:9", "signaled", 137),
        ("TIMEOUT", "0", "time_limit", 124),
        ("CANCELLED", "15", "cancelled", 143),
        ("NODE_FAIL", "0", "lost", None),
    ],
)
def test_an_end_has_an_outcome_and_an_exit_status(
    state: str, exit_code: str, outcome: str, status: int | None
) -> None:
    shown = view(job(state=state, exit_code=exit_code), SHARD)
    assert (shown.state, shown.outcome, shown.exit_status) == ("ended", outcome, status)


def test_a_job_that_was_cancelled_while_it_waited_never_started() -> None:
    waited = job(state="CANCELLED")
    del waited["nodelist"]
    shown = view(waited, SHARD)
    assert (shown.started_at, shown.exit_status, nodes_of(shown)) == (None, None, "")


def test_a_job_that_did_not_start_at_once_was_not_ended_by_a_signal() -> None:
    immediate = job(state="FAILED", exit_code="1", reason="BadConstraints")
    del immediate["nodelist"]
    shown = view(immediate, SHARD)
    assert (shown.outcome, shown.exit_status) == ("gave_up", None)


@pytest.mark.parametrize(
    ("indices", "label", "count"),
    [("3", "17_3", 1), ("4-99%8", "17_[4-99%8]", 96), ("0-8:2,11", "17_[0-8:2,11]", 6)],
)
def test_elements_of_an_array_are_counted(indices: str, label: str, count: int) -> None:
    element = job(jobid="20", arraytaskid=indices, state="PENDING")
    assert (label_of(element), elements(element)) == (label, count)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("30:00", 1800), ("1-02:00:00", 93600), ("UNLIMITED", None), (None, None), ("-1:0", None),
    ],
)  # fmt: skip
def test_spans_of_slurm_are_read(text: str | None, expected: float | None) -> None:
    assert span_seconds(text) == expected


def test_a_limit_of_a_year_is_none() -> None:
    shown = view(job(timelimit="365-00:00:00"), SHARD)
    assert (shown.claim.time_limit, shown.expires_at) == (None, None)


def test_the_note_of_gpulease_is_the_reason_of_a_job_that_waits() -> None:
    refused = Note("n1: GPU 0: 20G are used", refused=1, nodes="n1")
    note = with_note("ticket 4 ", refused)
    waits = job(state="PENDING", reason="BeginTime", admin_comment=note)
    assert view(waits, SHARD).reason == "refused 1 time (n1): n1: GPU 0: 20G are used"
    done = job(state="COMPLETED", admin_comment=note)
    assert view(done, SHARD).reason is None
    other = job(state="CANCELLED", admin_comment="gpulease: stopped (idle): by an earlier version")
    assert view(other, SHARD).reason == "stopped (idle): by an earlier version"


def test_a_job_that_a_daemon_stopped_says_why() -> None:
    note = with_note("", Note("n1: it used 6G of 4G", stopped="over_lease"))
    stopped = view(job(state="CANCELLED", admin_comment=note), SHARD)
    assert (stopped.outcome, stopped.reason) == ("over_lease", "n1: it used 6G of 4G")


# Nodes.


def summary(at: float = NOW.timestamp(), **changes: Any) -> str:
    gpu = {
        "index": 0, "uuid": "GPU-a", "name": "NVIDIA A100", "state": "available",
        "total": 24 * GIB, "allocatable": 23 * GIB, "leased": 8 * GIB, "used": 10 * GIB,
        "unmanaged": 1 * GIB,
    }  # fmt: skip
    return encode(NodeSummary(at, SHARD, (GpuSummary(**gpu | changes),), "1.0"))


def shown(extra: str, state: str = "IDLE", rest: str = "") -> str:
    return f"NodeName=n1 Gres=gpu:1,shard:96 State={state} Extra={extra}{rest}\n"


def test_a_gpu_has_what_is_left_after_leases_their_overuse_and_strangers() -> None:
    (node,) = views_of(nodes_in(shown(summary())), NOW)
    (gpu,) = node.gpus
    assert (gpu.name, gpu.memory.committed, gpu.memory.headroom) == (
        "NVIDIA A100",
        9 * GIB,
        13 * GIB,
    )


@pytest.mark.parametrize("unknown", [{"used": None}, {"unmanaged": None}, {"leased": None}])
def test_what_is_unknown_leaves_nothing_free(unknown: dict[str, Any]) -> None:
    (node,) = views_of(nodes_in(shown(summary(state="unreadable", **unknown))), NOW)
    assert node.gpus[0].memory.headroom is None


def test_an_old_summary_says_nothing_of_use() -> None:
    (node,) = views_of(nodes_in(shown(summary(NOW.timestamp() - 100))), NOW)
    gpu = node.gpus[0]
    assert (node.is_old, gpu.state, gpu.memory.total) == (True, "unknown", 24 * GIB)
    assert (gpu.memory.used, gpu.memory.leased, gpu.memory.headroom) == (None, None, None)


def test_nodes_without_gpus_are_left_out() -> None:
    assert views_of(nodes_in("NodeName=login State=IDLE Gres=(null)\n"), NOW) == []


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("MIXED", "mixed"), ("IDLE+DRAIN", "drained"), ("MIXED+DRAIN", "draining"),
        ("IDLE*", "down"), ("IDLE+MAINTENANCE", "maintenance"), ("", "unknown"),
    ],
)  # fmt: skip
def test_a_state_of_slurm_is_one_word(text: str, state: str) -> None:
    assert views_of(nodes_in(shown(summary(), text)), NOW)[0].state == state


def test_the_reason_of_a_node_may_look_like_fields() -> None:
    rest = " Reason=fans State=BAD GPU=2 [root@2026-03-02T13:00:00] Comment=a"
    (node,) = views_of(nodes_in(shown(summary(), "DOWN", rest)), NOW)
    assert (node.state, node.reason) == ("down", "fans State=BAD GPU=2")
