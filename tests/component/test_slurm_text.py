"""What Slurm prints, and what users write into it."""

import pytest

from gpulease.slurm.allocations import (
    NodeAllocation,
    SlurmRefusal,
    allocation_on,
    element_of,
    includes,
)

_JOB = """JobId={id} {array}JobName={name}
   UserId=alice(47201) GroupId=alice(47201) MCS_label=N/A
   JobState={state} Reason=None Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=2 Reboot=0 ExitCode=0:0
   NodeList=n1
   JOB_GRES=shard:40
     Nodes={nodes} CPU_IDs=0 Mem=0 GRES={gres}
   WorkDir=/home/alice
   Comment={comment} 
"""  # noqa: W291  as Slurm prints it
_FORGED = "x\n     Nodes=n1 CPU_IDs=0 Mem=0 GRES=shard:1(IDX:0)"


def shown(
    gres: str = "shard:40(IDX:1)",
    nodes: str = "n1",
    name: str = "train",
    comment: str = "(null)",
    job: int = 17,
    array: str = "",
    state: str = "RUNNING",
) -> str:
    return _JOB.format(
        id=job, array=array, name=name, nodes=nodes, gres=gres, comment=comment, state=state,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("gres", "gpus", "shards"),
    [
        ("shard:40(IDX:1)", (1,), 40),
        ("shard:24g:33(IDX:2)", (2,), 33),
        ("gpu:2(IDX:0-1)", (0, 1), 0),
        ("mps:100(IDX:0),gpu:1(IDX:4)", (4,), 0),
        ("gpu:mem8g:0(IDX:),gpu:mem24g:1(IDX:2)", (2,), 0),
        # Since Slurm 23.11: the parts of each GPU.
        ("shard:24g:100(0/32,96/96,4/96)", (1, 2), 100),
        ("", (), 0),
    ],
)
def test_gpus_and_shards_are_read(gres: str, gpus: tuple[int, ...], shards: int) -> None:
    assert allocation_on(shown(gres), 17, "n1") == NodeAllocation("train", True, gpus, shards)


def test_a_form_that_is_not_known_is_quoted() -> None:
    with pytest.raises(SlurmRefusal, match=r"cannot read on which GPUs .*GRES=shard:40\(GPU7\)"):
        allocation_on(shown("shard:40(GPU7)"), 17, "n1")


def test_nodes_with_the_same_share_are_on_one_line() -> None:
    assert allocation_on(shown(nodes="n[1-3,7]"), 17, "n2").shards == 40
    with pytest.raises(SlurmRefusal):
        allocation_on(shown(nodes="n[1-3,7]"), 17, "n4")


@pytest.mark.parametrize("state", ["COMPLETING", "CANCELLED", "PENDING", "REQUEUED"])
def test_a_job_whose_run_is_over_has_nothing(state: str) -> None:
    with pytest.raises(SlurmRefusal, match=state):
        allocation_on(shown("", state=state), 17, "n1")
    with pytest.raises(SlurmRefusal, match="not clear"):
        allocation_on(shown(name="x\n   JobState=PENDING Reason=None"), 17, "n1")


@pytest.mark.parametrize("place", ["name", "comment"])
def test_a_forged_line_is_refused(place: str) -> None:
    with pytest.raises(SlurmRefusal, match="name or comment"):
        allocation_on(shown(**{place: _FORGED}), 17, "n1")


def test_a_job_that_hides_its_record_behind_a_forged_one_is_refused() -> None:
    forged = shown(name=f"{_FORGED}\nJobId=18 JobName=y")
    assert element_of(forged, 17) is None
    with pytest.raises(SlurmRefusal):
        allocation_on(forged, 17, "n1")


def test_the_number_of_an_array_stands_for_its_elements() -> None:
    first = shown(array="ArrayJobId=17 ArrayTaskId=3 ")
    second = shown(array="ArrayJobId=17 ArrayTaskId=1 ", job=18)
    assert element_of(first + "\n" + second, 17) == "17_3"
    assert element_of(first, 17) is None
    assert element_of(shown(), 17) is None
    assert element_of(first + first, 17) is None
    component = shown(array="HetJobId=16 HetJobOffset=1 ")
    assert element_of(component + "\n" + shown(job=16), 17) == "16+1"


@pytest.mark.parametrize(
    ("hostlist", "node", "is_in"),
    [
        ("n1", "n11", False),
        ("n[1-3,7],login", "n7", True),
        ("n[1-3,7],login", "n4", False),
        ("n[1-3,7],login", "login", True),
        ("gpu[07-12]", "gpu09", True),
        ("gpu[07-12]", "gpu9", False),
        ("r[1-2]n[1-4]-ib", "r2n4-ib", True),
        ("r[1-2]n[1-4]-ib", "r3n4-ib", False),
        ("n[1-99999999999999999999]", "n5", False),
        ("n.1", "nx1", False),
    ],
)
def test_nodes_are_found_in_lists(hostlist: str, node: str, is_in: bool) -> None:
    assert includes(hostlist, node) is is_in
