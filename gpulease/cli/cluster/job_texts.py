"""What `gpulease run` says about a job of Slurm."""

from gpulease.cli.format import clean
from gpulease.errors import SlurmFailed
from gpulease.slurm.allocations import allocation_on
from gpulease.slurm.commands import run_slurm


def started(job: int, node: str | None) -> str:
    """Say where a job has started."""
    where = f" on {clean(node)}" if node else ""
    return f"gpulease: job {job} started{where}{_gpus(job, node)}"


def _gpus(job: int, node: str | None) -> str:
    try:
        shown = run_slurm(["scontrol", "show", "job", "-d", str(job)])
        gpus = allocation_on(shown, job, node or "").gpus
    except SlurmFailed:
        return ""
    return f", {'GPU' if len(gpus) == 1 else 'GPUs'} {', '.join(map(str, gpus))}" if gpus else ""


def waiting(job: int) -> str:
    """Say why a job waits."""
    try:
        reason = run_slurm(["squeue", "--noheader", f"--jobs={job}", "--format=%r"]).strip()
    except SlurmFailed as error:
        reason = error.message
    return f"gpulease: job {job} waits" + (f": {clean(reason)}" if reason else "")


def no_log(error: OSError) -> str:
    """Say that the output is not kept."""
    return (
        f"gpulease: the output is shown here only, and not kept for gpulease logs: {error.strerror}"
    )
