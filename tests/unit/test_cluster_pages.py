"""What `status`, `list` and `show` print on a cluster, compared with files kept in tests/golden.

`GPULEASE_GOLDEN=write pytest tests/unit/test_cluster_pages.py` writes them; review the difference.
"""

import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta, timezone

import pytest

from goldens import compare, sentence
from gpulease.cli import tables
from gpulease.cli.tables import Page
from gpulease.drawing.words import display_width
from gpulease.errors import SlurmFailed
from gpulease.record import replace
from gpulease.slurm.annotations import GpuSummary, NodeSummary, Note, encode, nodes_in, with_note
from gpulease.slurm.command import job_page, list_page, status_page
from gpulease.slurm.command.job_control import refusal
from gpulease.slurm.command.jobs import view, why
from gpulease.slurm.command.views import JobList, JobView, StatusView, views_of
from gpulease.units import GIB, MIB
from unit.test_cluster_jobs import job

UTC_NOW = datetime(2026, 3, 2, 14, 0, tzinfo=UTC)
NOW = UTC_NOW.astimezone(timezone(timedelta(hours=1)))
SHARD = 256 * MIB
WAITS = {"state": "PENDING", "reason": "Resources"}


@pytest.fixture(autouse=True)
def in_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Read the local times of Slurm as UTC."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


def shown(number: int, where: Mapping[str, str] | None = None, **changes: str) -> JobView:
    fields = job(**{"jobid": str(number), "arrayjobid": str(number), **changes})
    if fields["state"] == "PENDING":
        del fields["nodelist"]
    return view(fields, SHARD, where)


def gpu(index: int, **changes: object) -> GpuSummary:
    known = {
        "total": 24 * GIB, "allocatable": 24 * GIB, "leased": 0, "used": 0, "unmanaged": 0,
    }  # fmt: skip
    return GpuSummary(index, f"GPU-{index}", "NVIDIA A30", "available", **{**known, **changes})  # type: ignore[arg-type]


def nodes() -> str:
    """Return what scontrol shows of four nodes."""
    at = UTC_NOW.timestamp()
    used = gpu(0, leased=8 * GIB, used=7 * GIB, unmanaged=2 * GIB)
    local = gpu(1, local=True)
    drained = replace(gpu(1), state="drained", detail="drained by alice: ECC errors")
    fields = {
        "n1": ("MIXED", encode(NodeSummary(at, SHARD, (used, local))), ""),
        "n2": (
            "IDLE+DRAIN",
            encode(NodeSummary(at, SHARD, (gpu(0), drained))),
            " Reason=new fans [root@2026-03-02T13:00:00]",
        ),
        "n3": ("IDLE", encode(NodeSummary(at - 600, SHARD, (gpu(0),))), ""),
        "n4": ("DOWN*", "", " Reason=Not responding [slurm@2026-03-02T13:00:00]"),
    }
    return "".join(
        f"NodeName={name} Gres=gpu:2,shard:192 State={state} Extra={extra}{rest}\n"
        for name, (state, extra, rest) in fields.items()
    )


def running() -> JobView:
    return shown(17, {"n1": "shard:16(IDX:0)"})


def whole() -> JobView:
    return shown(
        18, {"n2": "gpu:2(IDX:0-1)"}, username="bob", name="a very long name of a job",
        nodelist="n2", timelimit="UNLIMITED", **{"tres-per-node": "gres/gpu:2"},
    )  # fmt: skip


def waiting() -> list[JobView]:
    why = "n2: GPU 1: 20G are used outside any lease"
    refused = with_note("", Note(why, refused=2, nodes="n1 n2"))
    return [
        shown(19, **WAITS, starttime="2026-03-02T15:00:00"),
        shown(20, **WAITS, arraytaskid="0-99%8", username="bob", starttime="N/A"),
        shown(
            21, state="PENDING", reason="BeginTime", eligibletime="2026-03-02T14:01:00",
            admin_comment=refused, starttime="2026-03-02T14:01:00", restartcnt="2",
        ),
    ]  # fmt: skip


def ended() -> list[JobView]:
    return [
        shown(11, state="FAILED", exit_code="768", endtime="2026-03-02T13:40:00"),
        shown(12, state="TIMEOUT", endtime="2026-03-02T13:45:00", username="bob"),
    ]


def pages(width: int | None) -> dict[str, Page]:
    status = StatusView(
        NOW.isoformat(),
        views_of(nodes_in(nodes()), NOW),
        [whole(), running(), *waiting()],
        waiting=202,
    )
    empty = StatusView(NOW.isoformat(), [], [], waiting=0)
    every = JobList([*ended(), running(), whole(), *waiting()], 9)
    elements = [
        shown(30, arrayjobid="29", arraytaskid="0"), shown(31, arrayjobid="29", arraytaskid="1"),
        shown(29, **WAITS, arraytaskid="2-99"),
    ]  # fmt: skip
    return {
        "cluster-status": status_page.page(status, NOW, "alice", width),
        "cluster-status-empty": status_page.page(empty, NOW, "alice", width),
        "cluster-list": list_page.page(every, NOW),
        "cluster-list-empty": list_page.page(JobList(), NOW),
        "cluster-show": job_page.page(running(), NOW, "/home/alice/slurm-17.out"),
        "cluster-show-refused": job_page.page(waiting()[2], NOW),
        "cluster-show-array": job_page.array_page("29", elements, NOW),
    }


@pytest.mark.parametrize("name", list(pages(None)))
def test_a_pipe_gets_all_of_it_in_plain_text(name: str) -> None:
    compare(f"{name}.plain", tables.draw(pages(None)[name], None))


@pytest.mark.parametrize("name", list(pages(60)))
def test_a_narrow_terminal_is_enough(name: str) -> None:
    text = tables.draw(pages(60)[name], 60)
    compare(f"{name}.60", text)
    assert max(map(display_width, text.splitlines()), default=0) <= 60


def test_strangers_cannot_steer_the_terminal() -> None:
    evil = {"name": "\x1b[2Jx", "username": "a\nb", "nodelist": "n\x07", "partition": "p\x1b"}
    waits = shown(2, **evil, **WAITS, admin_comment="gpulease: \u202e\x1b[2J")
    jobs = [shown(1, **evil), waits]
    shown_nodes = views_of(
        nodes_in("NodeName=n\x1b Gres=gpu:1 State=DOWN Reason=a\x07 [b@1]\n"), NOW
    )
    status = StatusView(NOW.isoformat(), shown_nodes, jobs, 1)
    text = tables.draw(status_page.page(status, NOW, "alice"), None)
    text += tables.draw(list_page.page(JobList(jobs, 2), NOW), None)
    text += "".join(tables.draw(job_page.page(each, NOW), None) for each in jobs)
    assert all(char.isprintable() or char == "\n" for char in text)
    assert "a?b" in text


@pytest.mark.parametrize(
    "reason",
    ["Resources", "Priority", "None", "Dependency", "JobHeldUser", "JobHeldAdmin",
     "DependencyNeverSatisfied", "AssocGrpGRES", "QOSMaxGRESPerUser",
     "ReqNodeNotAvail, UnavailableNodes:n1", "SomethingNew"],
)  # fmt: skip
def test_why_a_job_waits_is_said_in_words(reason: str) -> None:
    waits = job(**{**WAITS, "reason": reason}, dependency="afterok:1(unfulfilled),afterany:2")
    sentence(f"slurm waits: {reason}", why(waits, "queued"))


def test_nodes_that_a_job_cannot_have_are_named() -> None:
    note = with_note("", Note("n4: 20G are used", refused=2, nodes="n1 n4", rounds=1))
    reason = "ReqNodeNotAvail, UnavailableNodes:n[2-3]"
    waits = job(state="PENDING", reason=reason, admin_comment=note)
    sentence("slurm waits: without nodes", why(waits, "queued"))


@pytest.mark.parametrize(
    "said",
    ["scancel: error: Kill job error on job id 3: Access/permission denied",
     "Invalid user id for job 3", "Job has already finished for job 3", "Something new"],
)  # fmt: skip
def test_what_slurm_refuses_is_said_in_words(said: str) -> None:
    error = refusal(SlurmFailed(said), "cancel", "3", job())
    sentence(f"slurm refuses: {said}", f"{error.message}\n{error.hint}")
