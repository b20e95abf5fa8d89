"""Starts wounded daemons quickly: imports gpulease once, and forks for each.

Reads a line of JSON from stdin for each daemon: its arguments, its environment, its log. Writes
its pid to stdout.
"""

import json
import os
import signal
import sys

from gpulease.daemon.main import main
from gpulease.shim.linux import die_with_parent
from torture import points, wounds


def _be_daemon(wanted: dict[str, object]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Whatever becomes of the torture, no daemon of it stays.
    die_with_parent(signal.SIGKILL)
    os.environ.update(wanted["environment"])  # type: ignore[call-overload]
    os.environ[points.DAEMON] = str(os.getpid())
    log = os.open(str(wanted["log"]), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for target, fd in ((0, null), (1, log), (2, log)):
        os.dup2(fd, target)
    os.chdir("/")
    main(wanted["arguments"])  # type: ignore[arg-type]


if __name__ == "__main__":
    wounds.install()
    # Nobody waits for them: the tester holds a descriptor of each.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if (pid := os.fork()) == 0:
            _be_daemon(json.loads(line))
        print(pid, flush=True)
