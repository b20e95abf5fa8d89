"""A node of the cluster: a machine with a slurmd and a gpuleased on simulated GPUs."""

import subprocess
import sys
from pathlib import Path

from daemon_rig import wait_for
from gpulease.client import Client
from gpulease.config import SYSTEM_SOCKET
from gpulease.errors import NoDaemon

from .machine import Disk, Machine
from .slurm_files import NodeSpec

_HOLD = """
import sys
size = int(sys.argv[1])
memory = bytearray(size)
memory[::4096] = b"x" * len(range(0, size, 4096))
print("held", flush=True)
sys.stdin.read()
"""


class Node:
    """One node: a machine with a slurmd and a gpuleased."""

    def __init__(self, spec: NodeSpec, shared: Path, disk: Disk, own_cgroups: bool) -> None:
        self.spec = spec
        self.machine = Machine(
            spec.name, shared, disk, gpus=len(spec.described.gpus), own_cgroups=own_cgroups
        )

    @property
    def name(self) -> str:
        return self.spec.name

    def path(self, inside: str) -> Path:
        """Return the path from outside of an absolute path on the running node."""
        return self.machine.path(inside)

    def client(self) -> Client:
        """Return a client of this node's gpuleased, as root."""
        return Client(self.path(str(SYSTEM_SOCKET)))

    def start_daemon(self, config: str | None = None) -> None:
        """Start gpuleased, with /etc/gpulease/config.toml as given or as before."""
        if config is not None:
            self.path("/etc/gpulease/config.toml").write_text(config)
        argv = [sys.executable, "-m", "gpulease.daemon", "--simulate", self.spec.gpus]
        self.machine.start("gpuleased", argv)
        wait_for(f"gpuleased on {self.name} answers", self._answers)

    def kill_daemon(self) -> None:
        """Kill gpuleased (-9); what it launched goes on."""
        self.machine.daemon("gpuleased").kill()

    def start_slurmd(self) -> None:
        self.machine.start("slurmd", ["slurmd", "-D", "-N", self.name])

    def kill_slurmd(self) -> None:
        """Kill slurmd (-9); its jobs go on."""
        self.machine.daemon("slurmd").kill()

    def start(self) -> None:
        """Boot, and start both daemons."""
        self.machine.boot()
        self.path("/etc/gpulease").mkdir(exist_ok=True)
        self.path("/var/spool/slurmd").mkdir(exist_ok=True)
        self.start_slurmd()
        self.start_daemon(self.spec.settings)

    def crash(self) -> None:
        """Lose all processes of the node at once."""
        self.machine.crash()

    def uuid(self, gpu: int) -> str:
        """Return the UUID of a simulated GPU."""
        return next(it.uuid for it in self.client().status().gpus if it.index == gpu)

    def stranger(self, size: int, gpu: int = 0, user: str = "bob") -> subprocess.Popen[bytes]:
        """Start a process outside any lease that holds bytes of a GPU until it is killed."""
        command = self.machine.command(
            [sys.executable, "-c", _HOLD, str(size)], user, "/",
            {"CUDA_VISIBLE_DEVICES": self.uuid(gpu)},
        )  # fmt: skip
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        return process

    def _answers(self) -> bool:
        assert self.machine.is_running("gpuleased"), self.machine.log("gpuleased")
        try:
            self.client().status()
        except NoDaemon:
            return False
        return True
