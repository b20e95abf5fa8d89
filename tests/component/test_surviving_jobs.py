"""What a recovery learns of running jobs, also where a process holds up whoever looks at it."""

import json
import os
from pathlib import Path

import pytest

from gpulease.daemon.recover import surviving_jobs
from gpulease.host import proc_reader
from gpulease.host.proc_reader import ProcReader
from gpulease.host.processes import MARKER
from gpulease.worker.environment import HOOK_VARIABLE
from process_rig import PATH, job_directory, shell, start

GPU = {"uuid": "GPU-a", "index": 0, "name": "A", "memory": 1 << 30}
LEASED = PATH | {MARKER: "lab/17", HOOK_VARIABLE: json.dumps({"gpus": [GPU]})}


def test_a_process_that_holds_up_its_reader_does_not_hold_up_a_recovery(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with job_directory() as directory:
        pid = start(shell(directory, "exec sleep 1000", environment=LEASED)).pid
        (seen,) = surviving_jobs(directory.parent)
        assert seen.found is not None
        assert seen.installation == "lab"
        # A FIFO that nobody writes to: to open it takes for ever.
        (tmp_path / str(pid)).mkdir()
        os.mkfifo(tmp_path / str(pid) / "environ")
        monkeypatch.setattr(proc_reader, "_reader", ProcReader(tmp_path, 0.2))
        (seen,) = surviving_jobs(directory.parent)
        assert seen.alive
        assert seen.found is None
