"""Jobs of Slurm, read from squeue, and why they wait or ended, in words."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType

from gpulease.cli.exit_codes import SIGNALED
from gpulease.errors import EXIT_TIME_LIMIT
from gpulease.slurm.allocations import includes
from gpulease.slurm.annotations import Note, note_in
from gpulease.slurm.command.views import ArrayWaitingView, ClaimView, JobView, LeaseView
from gpulease.slurm.commands import DEADLINE_S, run_slurm
from gpulease.slurm.records import (
    Requested,
    ending,
    fixed_format,
    is_batch,
    parse_fixed,
    placements,
    requested,
)

WIDTHS: Mapping[str, int] = {
    "jobid": 12, "arrayjobid": 12, "arraytaskid": 72, "name": 128, "username": 33, "state": 16,
    "reason": 200, "tres-per-node": 100, "tres-per-job": 60, "tres-per-socket": 60,
    "tres-per-task": 60, "numtasks": 12, "numnodes": 12, "nodelist": 100, "submittime": 20,
    "starttime": 20, "endtime": 20, "eligibletime": 20, "timelimit": 20, "dependency": 120,
    "exit_code": 12, "restartcnt": 8, "batchflag": 4, "partition": 40, "admin_comment": 800,
}  # fmt: skip
"""The fields of squeue, and their widths in bytes."""
_RESOURCES = ("tres-per-node", "tres-per-job", "tres-per-socket")
_STATES = {
    "PENDING": "queued", "REQUEUED": "queued", "REQUEUE_HOLD": "queued", "REQUEUE_FED": "queued",
    "SPECIAL_EXIT": "queued", "CONFIGURING": "granted", "RUNNING": "active", "SUSPENDED": "active",
    "STOPPED": "active", "RESIZING": "active", "SIGNALING": "active", "STAGE_OUT": "releasing",
    "COMPLETING": "releasing",
}  # fmt: skip
"""All others are ends."""
_OUTCOMES = {
    "CANCELLED": "cancelled", "REVOKED": "cancelled", "TIMEOUT": "time_limit",
    "NODE_FAIL": "lost", "PREEMPTED": "preempted", "BOOT_FAIL": "launch_failed",
    "DEADLINE": "gave_up",
}  # fmt: skip
_RANGE = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")
_YEAR_S = 365 * 24 * 3600.0
"""What Slurm shows as the limit of a running job that has none."""
_DAY_S = 24 * 3600
_UNAVAILABLE = re.compile(r"UnavailableNodes:([^\s()]+)")
_WAITS = {
    "Resources": "no GPU has enough free memory now",
    "Priority": "jobs with higher priority are first",
    "None": "Slurm has not considered it yet",
    "JobHeldUser": "held by its user; to release it: scontrol release {job}",
    "JobHeldAdmin": "held by an admin",
    "JobArrayTaskLimit": "as many elements of its array run as may run at once",
    "DependencyNeverSatisfied": "a job that it depends on did not end as required",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition starts no jobs",
    "PartitionTimeLimit": "its time limit is longer than that of its partition",
    "PartitionNodeLimit": "its partition has not as many nodes",
    "PartitionConfig": "its partition does not allow what it asks for",
    "ReqNodeNotAvail": "no available node has room for it",
    "Reservation": "it waits for its reservation",
    "BadConstraints": "no node is as it asks for",
    "NodeDown": "a node that it asks for is down",
    "Cleaning": "its last run is being cleaned up",
    "Licenses": "it waits for licenses",
    "job requeued in held state": "held; to release it: scontrol release {job}",
    "launch failed requeued held": "it could not be launched, and is held; "
    "to release it: scontrol release {job}",
    "JobLaunchFailure": "it could not be launched",
}
_LIMITS = ("Assoc", "QOS", "Max")
_ENDED = {
    "TIMEOUT": "it reached its time limit",
    "NODE_FAIL": "its node failed",
    "BOOT_FAIL": "its node could not boot",
    "OUT_OF_MEMORY": "it ran out of main memory",
    "PREEMPTED": "it made way for another job",
    "DEADLINE": "it did not start before its deadline",
}


def read_queue(
    *,
    ended: bool = False,
    user: str | None = None,
    jobs: Sequence[str] = (),
    each_element: bool = False,
    deadline: float = DEADLINE_S,
) -> list[Mapping[str, str]]:
    """Return the fields of jobs as squeue prints them, those that wait in the order of the queue.

    The waiting elements of an array are one entry, unless `each_element` is asked for.

    Raises:
        SlurmFailed: Slurm does not answer, or knows none of the `jobs`.
    """
    line = ["squeue", "--noheader", "--all", "--sort=t,-p,i", f"--Format={fixed_format(WIDTHS)}"]
    if ended or jobs:
        line.append("--states=all")
    if user is not None:
        line.append(f"--user={user}")
    if jobs:
        line.append(f"--jobs={','.join(jobs)}")
    if each_element:
        line.append("--array")
    return list(parse_fixed(run_slurm(line, deadline=deadline), WIDTHS))


def jobs_of(user: str | None = None, *, ended: bool) -> list[Mapping[str, str]]:
    """Return the jobs of a user, or of the caller, that use GPUs, oldest first."""
    found = read_queue(ended=ended, user=user or str(os.geteuid()))
    return sorted(filter(uses_gpus, found), key=lambda job: int(job["jobid"]))


def uses_gpus(job: Mapping[str, str]) -> bool:
    """Return whether a job asks for GPUs or a part of one."""
    return bool(_requested(job))


def state_of(job: Mapping[str, str]) -> str:
    """Return queued, granted, active, releasing or ended."""
    return _STATES.get(job.get("state", ""), "ended")


def label_of(job: Mapping[str, str]) -> str:
    """Return the id as people see it: 17, 17_3, or 17_[4-99] for waiting elements."""
    array, index = job.get("arrayjobid"), job.get("arraytaskid")
    if index is None:
        return job["jobid"]
    return f"{array}_{index}" if index.isdecimal() else f"{array}_[{index}]"


def elements(job: Mapping[str, str]) -> int:
    """Return how many jobs an entry of the queue stands for."""
    index = job.get("arraytaskid", "")
    count = 0
    for first, last, step in _RANGE.findall(index.partition("%")[0]):
        count += (int(last) - int(first)) // int(step or 1) + 1 if last else 1
    return max(1, count)


def order_of(job: JobView) -> tuple[int, int]:
    """Return what sorts jobs by age, and elements of an array by index."""
    indices = job.array_waiting.indices if job.array_waiting else str(job.array_index or 0)
    first = _RANGE.search(indices)
    return job.array or job.id, int(first[1]) if first else 0


def view(
    job: Mapping[str, str],
    shard: int,
    where: Mapping[str, str] | None = None,
    used: Mapping[str, int] = MappingProxyType({}),
) -> JobView:
    """Return a job for people and as JSON.

    `where` has its GPUs by node, see `placements`; `used` what jobs used at most, by number.
    """
    state, wanted = state_of(job), _requested(job)
    claim = _claim(job, wanted, shard)
    started = _instant(job.get("starttime"))
    index, limit = job.get("arraytaskid", ""), claim.time_limit
    waits = state == "queued"
    note = note_of(job)
    never_ran = state == "ended" and "nodelist" not in job
    return JobView(
        id=int(job["jobid"]),
        label=label_of(job),
        name=job.get("name", ""),
        user=job.get("username", ""),
        state=state,
        outcome=_outcome(job) if state == "ended" else None,
        reason=why(job, state),
        claim=claim,
        nodes=job.get("nodelist"),
        leases=[] if state in ("queued", "ended") else list(_leases(job, claim, where or {})),
        used=None if waits else used.get(job["jobid"]),
        submitted_at=_instant(job.get("submittime")),
        started_at=None if waits or never_ran else started,
        ended_at=_instant(job.get("endtime")) if state == "ended" else None,
        expires_at=_instant(job.get("endtime")) if state == "active" and limit else None,
        expected_start_at=started if waits else None,
        begin_at=_instant(job.get("eligibletime")) if job.get("reason") == "BeginTime" else None,
        exit_status=exit_status(job) if state == "ended" and not never_ran else None,
        suspended=job.get("state") in ("SUSPENDED", "STOPPED"),
        array=int(job["arrayjobid"]) if index else None,
        array_index=int(index) if index.isdecimal() else None,
        array_waiting=(
            ArrayWaitingView(index, elements(job)) if index and not index.isdecimal() else None
        ),
        dependency=job.get("dependency"),
        comment=None if note is None else str(note),
        requeued=int(job.get("restartcnt", 0)),
        batch=is_batch(job.get("batchflag", "")),
        partition=job.get("partition", ""),
        slurm_state=job.get("state", ""),
        slurm_reason=job["reason"] if job.get("reason", "None") != "None" else None,
    )


def with_gpus(
    jobs: Sequence[Mapping[str, str]], shard: int, used: Mapping[str, int] = MappingProxyType({})
) -> list[JobView]:
    """Return jobs for people, with the GPUs of those that hold some."""
    records: dict[str, str] = {}
    if any(state_of(job) in ("active", "releasing") for job in jobs):
        shown = run_slurm(["scontrol", "show", "job", "--details", "--all"])
        for each in f"\n{shown}".split("\nJobId=")[1:]:
            number = each.partition(" ")[0]
            # What the name of another job forges makes a node occur twice.
            records[number] = records.get(number, "") + "\n" + each
    return [view(job, shard, placements(records.get(job["jobid"], "")), used) for job in jobs]


def _requested(job: Mapping[str, str]) -> Requested:
    if together := requested(*(job.get(name) for name in _RESOURCES)):
        return together  # which the tasks divide
    each = requested(job.get("tres-per-task"))
    counts = (job.get(name, "") for name in ("numtasks", "numnodes"))
    tasks, nodes = (int(text) if text.isdecimal() and int(text) else 1 for text in counts)
    on_node = -(-tasks // nodes)
    return Requested(each.gpus * on_node, each.shards * on_node)


def _claim(job: Mapping[str, str], wanted: Requested, shard: int) -> ClaimView:
    limit = span_seconds(job.get("timelimit"))
    return ClaimView(
        memory=wanted.shards * shard or None,
        gpus=wanted.gpus or 1,
        exclusive=bool(wanted.gpus),
        time_limit=None if limit is None or limit >= _YEAR_S else limit,
    )


def _leases(
    job: Mapping[str, str], claim: ClaimView, where: Mapping[str, str]
) -> Iterator[LeaseView]:
    nodes = job.get("nodelist", "")
    known = {node: text for node, text in where.items() if node == nodes or includes(nodes, node)}
    if not known and nodes:
        yield LeaseView(nodes, None, claim.memory)
    for node, text in known.items():
        # GPUs of several types are listed one by one: gpu:a30:1(IDX:0),gpu:a100:1(IDX:1).
        indexes = dict.fromkeys(re.findall(r"\(IDX:([\d,-]+)\)", text))
        yield LeaseView(node, ",".join(indexes) or None, claim.memory)


def _outcome(job: Mapping[str, str]) -> str:
    state = job.get("state", "")
    if state == "CANCELLED" and (note := note_of(job)) is not None and note.stopped:
        return note.stopped
    if outcome := _OUTCOMES.get(state):
        return outcome
    if state == "FAILED" and "nodelist" not in job:
        return "gave_up"  # srun --immediate; Slurm shows an exit code all the same
    _, signal = ending(job.get("exit_code", "")) or (0, 0)
    return "signaled" if signal else "exited"


def exit_status(job: Mapping[str, str]) -> int | None:
    """Return the exit code of an ended job as a shell shows it."""
    if job.get("state") == "TIMEOUT":
        return EXIT_TIME_LIMIT
    if job.get("state") == "NODE_FAIL":
        return None  # Slurm shows 0
    if (ended := ending(job.get("exit_code", ""))) is None:
        return None
    code, signal = ended
    return SIGNALED + signal if signal else code


def span_seconds(text: str | None) -> float | None:
    """Return a span of Slurm, such as 1-02:00:00 or 30:00, in seconds; None: unlimited."""
    days, dash, clock = (text or "").rpartition("-")
    parts = clock.split(":")
    if not all(part.isdecimal() for part in parts) or (dash and not days.isdecimal()):
        return None
    hours, minutes, seconds = [0] * (3 - len(parts)) + [int(part) for part in parts]
    return float(int(days or 0) * _DAY_S + hours * 3600 + minutes * 60 + seconds)


def _instant(text: str | None) -> str | None:
    """Return an instant of Slurm, in local time, as one in UTC."""
    try:
        local = datetime.fromisoformat(text or "")
    except ValueError:  # Unknown
        return None
    return f"{local.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def why(job: Mapping[str, str], state: str) -> str | None:
    """Return why a job waits or ended; None for what needs no words."""
    note = note_of(job)
    if state == "ended":
        # A batch job that was refused has run elsewhere since.
        if note is not None and note.stopped:
            return note.why
        was_refused = note and note.refused and is_batch(job.get("batchflag", ""))
        return _joined(_ENDED.get(job.get("state", "")), None if was_refused else note)
    return _joined(_waits(job), *_without_nodes(job, note), note) if state == "queued" else None


def note_of(job: Mapping[str, str]) -> Note | None:
    """Return what gpulease noted with a job, after what admins wrote there."""
    return note_in(job.get("admin_comment", ""))


def _waits(job: Mapping[str, str]) -> str | None:
    reason = job.get("reason", "None")
    if reason == "Dependency":
        jobs = job.get("dependency", "other jobs").replace("(unfulfilled)", "")
        return f"it waits for {jobs.replace(',', ', ')}"
    if reason == "BeginTime":
        return None  # pages write the time
    word = reason.strip("()").partition(",")[0]
    if text := _WAITS.get(word):
        return text.format(job=job.get("arrayjobid", job["jobid"]))
    return f"a limit of Slurm: {reason}" if word.startswith(_LIMITS) else reason


def _without_nodes(job: Mapping[str, str], note: Note | None) -> Iterator[str]:
    """Yield which nodes are out of service, and which are excluded because they refused the job."""
    if not job.get("reason", "").startswith("ReqNodeNotAvail"):
        return
    if found := _UNAVAILABLE.search(job["reason"]):
        yield f"not available: {found[1]}"
    if note is not None and note.nodes:
        yield f"excluded for a minute after they refused it: {', '.join(note.refused_by)}"


def _joined(*parts: object) -> str | None:
    return "; ".join(str(part) for part in parts if part) or None
