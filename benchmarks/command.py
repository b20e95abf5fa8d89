"""The start time of the command, compared with that of Python."""

import subprocess
import sys
from collections.abc import Iterator

from benchmarks.daemon import running
from benchmarks.timing import paired


def run() -> Iterator[str]:
    with running() as daemon:
        for verb in (["--version"], ["status"], ["run", "--mem", "1G", "--", "true"]):
            command = [sys.executable, "-m", "gpulease.cli", *verb]
            ours, python = paired(
                lambda c=command: subprocess.run(
                    c, check=True, capture_output=True, env=daemon.env
                ),
                lambda: subprocess.run([sys.executable, "-c", "pass"], check=True),
                9,
            )
            yield (
                f"gpulease {' '.join(verb)}: {ours * 1e3:.0f} ms, "
                f"{ours / python:.1f} times a bare Python"
            )
