"""Starts wounded daemons as `daemon_zygote` starts others."""

import os

from daemon_zygote import serve
from torture import points, wounds


def _note_pid() -> None:
    os.environ[points.DAEMON] = str(os.getpid())


if __name__ == "__main__":
    wounds.install()
    serve(_note_pid)
