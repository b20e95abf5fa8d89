"""What a daemon that runs keeps in memory: no package that serves its start or a rare verb."""

import subprocess
import sys

RARE = {"alembic", "mako", "gpulease.daemon.recover", "gpulease.setup"}
FOREIGN = {"anyio", "fastapi", "pydantic", "rich", "starlette", "typer"}


def test_the_daemon_imports_neither_frameworks_nor_rare_verbs() -> None:
    program = "import sys, gpulease.daemon.main; print(*sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert not set(ran.stdout.split()) & (RARE | FOREIGN)
