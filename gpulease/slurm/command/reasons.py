"""Why a job of Slurm waits or ended, in words."""

import re
from collections.abc import Iterator, Mapping

from gpulease.slurm.notes import Note, note_in
from gpulease.slurm.records import is_batch

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


def reason_of(job: Mapping[str, str], state: str) -> str | None:
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
        return f"it waits for {_dependency(job)}"
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


def _dependency(job: Mapping[str, str]) -> str:
    return job.get("dependency", "other jobs").replace("(unfulfilled)", "").replace(",", ", ")


def _joined(*parts: object) -> str | None:
    return "; ".join(str(part) for part in parts if part) or None
