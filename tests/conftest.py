"""What holds for every test: the code is this tree's, and no property fails for a slow machine."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from gpulease.config import SYSTEM_SOCKET

settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

_PACKAGE = Path(__file__).parents[1] / "gpulease"
_WHERE = "import importlib.util as u; s = u.find_spec('gpulease'); print(s and s.origin)"


_ASKED_TO_IGNORE = {
    signal.SIGHUP: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
    signal.SIGQUIT: signal.SIG_DFL,
}
"""What nohup(1) and a shell's `&` have a command ignore, and all that it starts."""


_SLOW = ("e2e", "frameworks", "fuzz", "slurm", "web")
"""Folders of the second tier; a test elsewhere may belong to it, too."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of `make test-slow`."""
    for item in items:
        if item.path.parent.name in _SLOW:
            item.add_marker("slow")


def pytest_configure(config: pytest.Config) -> None:
    """Make this machine one on which the tests can tell something."""
    # A command that was started with Ctrl-C ignored is right to ignore it, and hands that on.
    for number, usual in _ASKED_TO_IGNORE.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)
    # An active environment decides which python a .py runs under, and is nobody's in a test.
    os.environ.pop("VIRTUAL_ENV", None)
    # The size of the terminal, if any, is told to who asks it: readline(3) exports it here.
    for name in ("COLUMNS", "LINES"):
        os.environ.pop(name, None)
    # What the tester has configured for jobs of their own.
    for name in ("GPULEASE_RUN_OPTIONS", "CUDA_VISIBLE_DEVICES"):
        os.environ.pop(name, None)
    os.environ["XDG_CONFIG_HOME"] = os.devnull
    _refuse_a_mixture(config)


def _refuse_a_mixture(config: pytest.Config) -> None:
    """Refuse to test a mixture: daemons are started in /, and import what is installed.

    pytest itself imports from the directory it was started in, which may be another checkout.
    """
    if hasattr(config, "workerinput"):
        return  # the first process has looked
    asked = subprocess.run(
        [sys.executable, "-c", _WHERE], cwd="/", check=True, capture_output=True, text=True
    )
    found = asked.stdout.strip()
    if Path(found).parent != _PACKAGE:
        pytest.exit(
            f"the daemons of these tests would run {found} and not {_PACKAGE}; "
            f"try: {sys.executable} -m pip install -e {_PACKAGE.parent}",
            returncode=pytest.ExitCode.USAGE_ERROR,
        )


@pytest.fixture
def no_daemon_of_the_machine() -> None:
    """Skip where the commands of a test would meet the daemon of this very machine."""
    with socket.socket(socket.AF_UNIX) as asking:
        try:
            asking.connect(str(SYSTEM_SOCKET))
        except OSError:
            return
    pytest.skip(f"a gpuleased listens on {SYSTEM_SOCKET}, which this test would find")
