"""Python processes that use `gpulease.lease`, run from a script with a few names at hand."""

import os
import subprocess
import sys
from textwrap import dedent
from typing import Any

from daemon_rig import PATIENCE_S, Daemon

PLAIN = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
START = """\
import os, sys, gpulease
from gpulease.errors import *
def tell(*words): print(*words, flush=True)
"""


def source(script: str) -> list[str]:
    return [sys.executable, "-c", START + dedent(script)]


def environment(daemon: Daemon, **more: str) -> dict[str, str]:
    return PLAIN | {"GPULEASE_SOCKET": str(daemon.socket), "TF_CPP_MIN_LOG_LEVEL": "3"} | more


def run(daemon: Daemon, script: str, **more: str) -> str:
    """Run a script to its end, and return what it told."""
    ran = subprocess.run(
        source(script), env=environment(daemon, **more), capture_output=True, text=True,
        timeout=2 * PATIENCE_S, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


class Process:
    """A script that is still running; its `input()` waits for `go_on`."""

    def __init__(self, daemon: Daemon, script: str) -> None:
        self.popen = subprocess.Popen(
            source(script), env=environment(daemon), text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    @property
    def pid(self) -> int:
        return self.popen.pid

    def told(self) -> str:
        """Return the next line that it tells."""
        return _line(self.popen.stdout)

    def warned(self) -> str:
        """Return the next line on its stderr."""
        return _line(self.popen.stderr)

    def go_on(self) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write("\n")
        self.popen.stdin.flush()

    def end(self) -> tuple[str, str]:
        """Let it end, and return the rest of what it wrote to stdout and stderr."""
        return self.popen.communicate("\n", timeout=PATIENCE_S)

    def kill(self) -> None:
        self.popen.kill()
        self.popen.communicate()


def _line(stream: Any) -> str:
    return str(stream.readline()).strip()


def refusal(kind: str, call: str = 'gpulease.lease("1G")') -> str:
    """Return a script that tells the error of this kind that a call raises, and fails without."""
    return f"""
try:
    {call}
except {kind} as error:
    tell(error.text())
else:
    raise SystemExit("nothing was refused")
"""
