"""Why a job of Slurm waits or ended, in words."""

from collections.abc import Mapping

from gpulease.slurm.notes import note_in

_REFUSED = "refused "
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
    "ReqNodeNotAvail": "a node that it asks for is not available",
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
        was_refused = note is not None and note.startswith(_REFUSED) and job.get("batchflag") == "1"
        return _joined(_ENDED.get(job.get("state", "")), None if was_refused else note)
    return _joined(_waits(job), note) if state == "queued" else None


def note_of(job: Mapping[str, str]) -> str | None:
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


def _dependency(job: Mapping[str, str]) -> str:
    return job.get("dependency", "other jobs").replace("(unfulfilled)", "").replace(",", ", ")


def _joined(why: str | None, note: str | None) -> str | None:
    return "; ".join(filter(None, (why, note))) or None
