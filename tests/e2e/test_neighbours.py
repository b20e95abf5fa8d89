"""Two real daemons of two users on the GPUs of one driver: no memory is leased by both."""

import os
import random
import sqlite3
import subprocess
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from daemon_rig import Daemon, open_folder
from gpulease.path_ownership import closed_to_others
from nvml_stand_in import Card, StandIn

from .users import as_user, needs_root, told

G = 1024**3
_Lease = tuple[str, int, int, int]
"""The GPU, the bytes, the grant and the release."""
UIDS = {False: (47_301, 47_302), True: (47_303, 47_304)}
"""Users whom no database knows, without and with hidden processes: tests may run side by side."""
CARDS, TOTAL = 2, 24 * G
SUBMISSIONS = int(os.environ.get("GPULEASE_SUBMISSIONS", "60"))
PYTHON = sys.executable
if closed_to_others(Path(PYTHON).resolve()) is not None:
    PYTHON = "/usr/bin/python3"  # as where pyenv is in a home directory
_PACKAGES = os.pathsep.join((str(Path(__file__).parents[2]), sysconfig.get_paths()["purelib"]))
_HIDDEN = [
    "unshare",
    "--mount",
    "sh",
    "-c",
    'mount -t proc -o hidepid=2 proc /proc; exec "$@"',
    "-",
]
"""Runs a program where users see no processes of each other."""

# Each job uses up to its lease, or up to its bound, of all its GPUs at once.
_SUBMIT = """
import random, time
dice = random.Random({seed})
for _ in range({count}):
    size, gpus = dice.randint(1 << 30, 14 << 30), dice.choice((1, 1, 1, 2))
    bound = dice.choice((None, None, size + dice.randint(1 << 30, 8 << 30)))
    use = round((bound or size) * dice.random())
    script = "for gpu in $(echo $CUDA_VISIBLE_DEVICES | tr , ' ')"
    script += "; do echo %d > {held}/$gpu/$$; done"
    script = (script + "; exec sleep %.2f") % (use, dice.uniform(0.1, 0.8))
    body = {{
        "argv": ["/bin/sh", "-c", script], "cwd": "/", "environment": {{"PATH": "/usr/bin:/bin"}},
        "claim": {{"memory": size, "memory_bound": bound, "gpus": gpus}},
    }}
    status, reply = call("POST", "/v1/jobs", body)
    assert status == 201, reply
    time.sleep(dice.uniform(0, 0.1))
while call("GET", "/v1/status")[1]["jobs"]:
    time.sleep(0.2)
tell("ended")
"""


@dataclass
class DaemonOfUser(Daemon):
    """A daemon that runs as a user, perhaps where users see no processes of each other."""

    uid: int = 0
    hidden: bool = False

    def command(self) -> list[str]:
        become = ["setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups"]
        return [*(_HIDDEN if self.hidden else []), *become, PYTHON, *super().command()[1:]]

    def leases(self) -> list[_Lease]:
        """Return all leases there have been; none is left."""
        with closing(sqlite3.connect(self.state / "gpulease.db")) as connection:
            asked = "SELECT gpu, memory, granted_at, released_at FROM leases"
            return connection.execute(asked).fetchall()


@contextmanager
def daemons(hidden: bool) -> Iterator[tuple[list[DaemonOfUser], Path]]:
    """Yield the daemons of two users, and where processes say what they use of each GPU."""
    with open_folder() as folder, ExitStack() as stack:
        names = [f"GPU-{UIDS[hidden][0]}-{index}" for index in range(CARDS)]
        stand_in = StandIn(folder, [Card(total=TOTAL, uuid=name) for name in names])
        for index in range(CARDS):
            stand_in.held(index).chmod(0o1777)
        made = []
        for uid in UIDS[hidden]:
            own = folder / str(uid)
            own.mkdir(mode=0o711)
            os.chown(own, uid, uid)
            daemon = DaemonOfUser(
                own, simulate=None, settings={"grace": "1s"}, uid=uid, hidden=hidden,
                environment={
                    **stand_in.environment(), "HOME": str(own), "PYTHONPATH": _PACKAGES,
                },
            )  # fmt: skip
            stack.callback(daemon.end_all)
            made.append(daemon.start())
        yield made, stand_in.held(0).parent


@needs_root
@pytest.mark.parametrize("hidden", [False, True], ids=["visible", "hidepid"])
def test_no_memory_is_leased_by_two_users_at_once(hidden: bool) -> None:
    asked = [PYTHON, "-c", "import sys; print(sys.version_info[:2])"]
    if subprocess.check_output(asked, text=True).strip() != str(sys.version_info[:2]):
        pytest.skip(f"{PYTHON}, which users can run, cannot import what is installed here")
    seed = random.randrange(1 << 30)
    with daemons(hidden) as (both, held), ExitStack() as stack:
        programs = [
            _SUBMIT.format(seed=seed + daemon.uid, count=SUBMISSIONS, held=held) for daemon in both
        ]
        users = [
            stack.enter_context(as_user(daemon, daemon.uid, program))
            for daemon, program in zip(both, programs, strict=True)
        ]
        assert [told(user) for user in users] == ["ended"] * len(both), f"seed {seed}"
        leases = [daemon.leases() for daemon in both]
    most = most_at_once([lease for each in leases for lease in each])
    assert max(most.values()) <= TOTAL, f"seed {seed}: {most}"
    shared = {
        one[0]
        for one in leases[0]
        for other in leases[1]
        if one[0] == other[0] and one[2] < other[3] and other[2] < one[3]
    }
    assert shared == most.keys(), "both have leased some of each GPU at once"


def most_at_once(leases: Sequence[_Lease]) -> Mapping[str, int]:
    """Return the most bytes of each GPU that were leased at one time."""
    changes = [(granted, memory, gpu) for gpu, memory, granted, _ in leases]
    changes += [(released, -memory, gpu) for gpu, memory, _, released in leases]
    now, most = defaultdict[str, int](int), defaultdict[str, int](int)
    for _, change, gpu in sorted(changes):
        now[gpu] += change
        most[gpu] = max(most[gpu], now[gpu])
    return most
