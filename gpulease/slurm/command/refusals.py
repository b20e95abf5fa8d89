"""What Slurm refuses, in the words of gpulease."""

from collections.abc import Mapping

from gpulease.drawing.words import clean
from gpulease.errors import GpuleaseError, NotAllowed, SlurmFailed, WrongState

_DENIED = ("ermission denied", "nvalid user id", "not allowed")
_OVER = ("already finished", "already completing", "nvalid job id")


def refusal(error: SlurmFailed, doing: str, job: str, row: Mapping[str, str]) -> GpuleaseError:
    """Return the error for a job on which a command of Slurm failed; `doing` follows "cannot"."""
    if any(each in error.message for each in _DENIED):
        owner = clean(row.get("username", "another user"))
        return NotAllowed(
            f"cannot {doing} job {job}: it belongs to {owner}",
            "only its owner and the admins of Slurm may",
        )
    if any(each in error.message for each in _OVER):
        return WrongState(f"cannot {doing} job {job}: it has ended")
    return SlurmFailed(f"cannot {doing} job {job}: {clean(error.message)}", error.hint)
