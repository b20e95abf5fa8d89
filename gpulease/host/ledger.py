"""The file by which the processes of a job share its lease.

See worker/hooks/_gpulease_hooks/ledger.py. Its owner is the job's user, and it is a FIFO: in the
state directory a user must not be able to store data.
"""

import logging
import os
import stat
from pathlib import Path

_log = logging.getLogger(__name__)

LEDGER = "ledger"


def ensure_ledger(directory: Path, owner: tuple[int, int] | None) -> str:
    """Create the ledger in the directory of a job unless it is there; return its path.

    `owner` is its uid and gid; None for those of this process. A failure is logged only: the hooks
    report that they find no ledger.
    """
    path = directory / LEDGER
    try:
        if not _is_fifo(path):
            directory.mkdir(mode=0o711, exist_ok=True)
            os.mkfifo(path, 0o600)
            if owner is not None:
                os.chown(path, *owner, follow_symlinks=False)
    except OSError as error:
        _log.warning("cannot create %s: %s", path, error.strerror)
    return str(path)


def _is_fifo(path: Path) -> bool:
    try:
        return stat.S_ISFIFO(path.lstat().st_mode)
    except FileNotFoundError:
        return False
