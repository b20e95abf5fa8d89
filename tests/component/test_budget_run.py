"""What `gpulease run` may import and ask: figures that do not depend on the machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from component.test_client_run import active
from daemon_stand_in.daemon import StandIn
from daemon_stand_in.shim import ShimStandIn

_RUN = "import sys; from gpulease.cli.app import main; main()"
_LIBRARY = {
    "__future__", "_datetime", "_json", "_socket", "_struct", "errno", "fcntl", "gc", "itertools",
    "resource", "select", "struct", "termios", "_collections", "time",
}  # fmt: skip
_BEFORE_THE_REQUEST = {
    "build", "cli", "cli.app", "cli.caller", "cli.cluster", "cli.everyday", "cli.program",
    "cli.quick_defaults", "cli.quick_options", "cli.quick_parser", "cli.render", "cli.request",
    "cli.run_job", "cli.search_path", "cli.signals", "cli.waiting_line", "client", "client.http",
    "client.known_sockets", "client.light_client", "client.submission", "client.submitter",
    "client.transport", "client.unix_socket", "cluster_choice", "errors", "light_json", "locations",
    "peer_credentials", "record", "units", "wire", "wire.frames", "wire.text",
}  # fmt: skip
_WHILE_THE_DAEMON_COMMITS = {
    "cli.attachment", "cli.attachment.console", "cli.attachment.input", "cli.attachment.keyboard",
    "cli.attachment.messages", "cli.attachment.mode", "cli.attachment.session",
    "cli.attachment.shim_connection", "cli.attachment.shim_messages", "cli.attachment.terminal",
    "cli.exit_codes", "cli.follow", "cli.job_watch", "event_loop", "write_buffer",
}  # fmt: skip


def imported(*arguments: str, folder: Path) -> set[str]:
    """Return the modules that a Python imports by itself, after those of its own start."""
    log = folder / "imports"
    # Standard error is a file: with the end of the job the command exits at once.
    with log.open("wb") as stderr:
        ran = subprocess.run(
            [sys.executable, "-X", "importtime", *arguments], cwd=folder, stderr=stderr,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, timeout=60, check=False,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )  # fmt: skip
    assert ran.returncode == 0, log.read_text()
    lines = [line for line in log.read_text().splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip() for line in lines[1:]}


@pytest.mark.parametrize("detaches", [False, True], ids=["attached", "detached"])
def test_run_imports_next_to_nothing(
    detaches: bool, daemon: StandIn, shim: ShimStandIn, tmp_path: Path
) -> None:
    daemon.on_submit = active(shim)
    line = ["--socket", str(daemon.path), "run", "--mem", "4G", "--time", "1h", "--", "true"]
    if detaches:
        line.insert(3, "-d")
    else:
        shim.exit_soon()
    found = imported("-c", _RUN, *line, folder=tmp_path) - imported("-c", "pass", folder=tmp_path)
    ours = {name.removeprefix("gpulease.") for name in found if name.startswith("gpulease.")}
    attached = set() if detaches else _WHILE_THE_DAEMON_COMMITS
    assert "cli.run_job" in ours
    assert ours <= _BEFORE_THE_REQUEST | attached
    assert {name for name in found if not name.startswith("gpulease")} <= _LIBRARY


def test_run_asks_the_daemon_once_and_the_shim_once(
    daemon: StandIn, shim: ShimStandIn, tmp_path: Path
) -> None:
    daemon.on_submit = active(shim)
    shim.exit_soon()
    line = ["--socket", str(daemon.path), "run", "--mem", "4G", "--", "true"]
    imported("-c", _RUN, *line, folder=tmp_path)
    # The shim of this test accepts one connection.
    assert daemon.asked == ["POST /v1/jobs?follow=true"]
    assert shim.hello == {"role": "attach"}
