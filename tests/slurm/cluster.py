"""A Slurm cluster on this machine, with a gpuleased for each node.

By hand: `PYTHONPATH=tests python -m slurm.cluster --directory DIR [--nodes 3] [--gpus 2x24G]`.
"""

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from daemon_rig import PATIENCE_S, free_port, wait_for
from daemon_stand_in.terminal import Terminal
from gpulease.config import SYSTEM_SOCKET
from gpulease.slurm.setup.node_files import NAME, hook_text

from . import machine as machines
from .machine import REMOVE_CGROUPS, USERS, Disk, Machine, empty
from .node import Node
from .release import release
from .slurm_files import NodeSpec, Ports, Settings, write_files

# The last processes of the machines may still write while the kernel ends them.
_REMOVE = f"""
cat
for attempt in 1 2 3 4 5; do {REMOVE_CGROUPS} rm -rf "$1" && exit; sleep 1; done
"""

DEFAULT_NODES = (NodeSpec("n1"), NodeSpec("n2"), NodeSpec("n3"))


@dataclass
class Cluster:
    """A controller, a login machine and nodes; everything lies below `directory`."""

    directory: Path
    specs: Sequence[NodeSpec] = DEFAULT_NODES
    settings: Settings = field(default_factory=Settings)
    _opened: list[subprocess.Popen[Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        version = self.settings.release
        self._disk = Disk(self.directory, release(version) if version else None)
        self.controller = Machine("ctl", self.directory, self._disk)
        self.login = Machine("login", self.directory, self._disk, own_processes=False)
        self.nodes = {
            spec.name: Node(spec, self.directory, self._disk, self.settings.cgroup)
            for spec in self.specs
        }
        self._lay_out()

    # Life.

    def start(self) -> "Cluster":
        """Start everything, and wait until all nodes are idle and each gpuleased answers."""
        write_files(self.directory / "slurm", self.specs, _free_ports(self.specs), self.settings)
        self._disk.mount()
        apart = [self.controller, self.login]
        with ThreadPoolExecutor(len(self.nodes) + 2) as pool:
            list(pool.map(Machine.boot, apart))
            self._start_munge()
            self.start_controller()
            list(pool.map(Node.start, self.nodes.values()))
        self.wait_until_idle()
        return self

    def stop(self) -> None:
        """End all processes; the directory stays."""
        for process in self._opened:
            if process.poll() is None:
                process.kill()
            process.communicate()
        for each in (*(node.machine for node in self.nodes.values()), self.login):
            each.crash()
        self.controller.crash()
        self._disk.unmount()
        subprocess.run(["sh", "-c", REMOVE_CGROUPS, "sh", str(self.directory)], check=False)

    def start_controller(self) -> None:
        """Start slurmctld and wait until it answers."""
        self.controller.path("/var/spool/slurmctld").mkdir(exist_ok=True)
        self.controller.start("slurmctld", ["slurmctld", "-D"])
        wait_for("slurmctld answers", self._controller_answers)

    def kill_controller(self) -> None:
        """Kill slurmctld (-9)."""
        self.controller.daemon("slurmctld").kill()

    def wait_until_idle(self) -> None:
        """Wait until every node is up and without jobs."""
        wait_for("all nodes are idle", lambda: set(self.states().values()) == {"idle"})

    # Use.

    def command(
        self,
        *argv: str,
        user: str = "alice",
        node: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[str]:
        """Return the command line that runs `argv` on the login machine or on a node.

        The methods below pass `place` on to it.
        """
        machine = self.nodes[node].machine if node else self.login
        return machine.command(argv, user, cwd, env or {})

    def open(
        self, *argv: str, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a command of alice and leave it running; `options` are those of Popen.

        On the login machine, signals to it reach the command itself.
        """
        self._opened.append(subprocess.Popen(self.command(*argv, env=env), **options))
        return self._opened[-1]

    def terminal(self, *argv: str, size: tuple[int, int] = (24, 80)) -> Terminal:
        """Start a command of alice on a terminal; the caller finishes it or hangs up."""
        return Terminal(self.command(*argv, env={"TERM": "xterm", "PS1": "$ "}), size)

    def run(
        self,
        *argv: str,
        stdin: str | None = None,
        check: bool = True,
        within_s: float = PATIENCE_S,
        **place: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        done = subprocess.run(
            self.command(*argv, **place), check=False, text=True, capture_output=True,
            timeout=within_s, input=stdin or "",
        )  # fmt: skip
        assert not check or done.returncode == 0, (argv, done.stdout, done.stderr)
        return done

    def scontrol(self, *arguments: str) -> str:
        """Run scontrol as root and return what it printed."""
        return self.run("scontrol", *arguments, user="root").stdout

    def sbatch(self, script: str, *options: str, user: str = "alice") -> int:
        """Submit the text of a shell script and return the job's id."""
        text = f"#!/bin/sh\n{script}\n"
        return int(self.run("sbatch", "--parsable", *options, user=user, stdin=text).stdout)

    def job(self, job: int) -> dict[str, str]:
        """Return the fields of `scontrol show job -d`."""
        words = self.scontrol("show", "job", "-d", "-o", str(job)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_until(self, job: int, *states: str) -> dict[str, str]:
        """Return the job as soon as its JobState is one of `states`."""

        def there() -> dict[str, str] | None:
            shown = self.job(job)
            return shown if shown["JobState"] in states else None

        return wait_for(f"job {job} is {' or '.join(states)}", there)

    def wait_until_saved(self, job: int) -> None:
        """Wait until slurmctld has written the job's state, which it does every few seconds.

        A controller that is killed earlier takes a running job for a pending one, and starts it
        again.
        """
        file = self.controller.path("/var/spool/slurmctld/job_state")
        before = time.time()
        self.scontrol("update", f"jobid={job}", "comment=save")
        wait_for("the state is saved", lambda: file.exists() and file.stat().st_mtime > before)

    def states(self) -> dict[str, str]:
        """Return the state of each node, as sinfo names it."""
        lines = self.run("sinfo", "-h", "-N", "-o", "%N %T", user="root").stdout.splitlines()
        return dict(line.split() for line in lines)

    # Files.

    @property
    def home(self) -> Path:
        """The home directories, which all machines share as /home."""
        return self.directory / "home"

    def install(self, name: str, text: str) -> str:
        """Write an executable into /etc/slurm, which all machines share; return its path there."""
        file = self.directory / "slurm" / name
        file.write_text(text)
        file.chmod(0o755)
        return f"/etc/slurm/{name}"

    def _lay_out(self) -> None:
        self.directory.chmod(0o755)
        for part in ("layers/etc/slurm", "layers/var", "slurm", "munge", "home"):
            (self.directory / part).mkdir(parents=True, exist_ok=True)
        for user, uid in USERS.items():
            if uid:
                (self.home / user).mkdir(exist_ok=True)
                shutil.chown(self.home / user, uid, uid)
        self._write_users(self.directory / "layers/etc")
        names = " ".join(["ctl", "login", *self.nodes])
        (self.directory / "layers/etc/hosts").write_text(f"127.0.0.1 localhost {names}\n")

    def _write_users(self, etc: Path) -> None:
        added = {name: uid for name, uid in USERS.items() if uid}
        lines = {
            "passwd": [f"{it}:x:{uid}:{uid}::/home/{it}:/bin/sh" for it, uid in added.items()],
            "group": [f"{it}:x:{uid}:" for it, uid in added.items()],
        }
        for file, more in lines.items():
            there = Path("/etc", file).read_text().splitlines()
            kept = [line for line in there if line.split(":", 1)[0] not in added]
            (etc / file).write_text("\n".join([*kept, *more]) + "\n")

    def _start_munge(self) -> None:
        folder = self.directory / "munge"
        empty(folder)
        key = folder / "munge.key"
        key.write_bytes(b"the key of this test's cluster, of 32 bytes or more")
        key.chmod(0o600)
        self.controller.start("munged", [
            "munged", "--foreground", "--force", "--key-file=/run/munge/munge.key",
            "--pid-file=/run/munged.pid", "--seed-file=/run/munged.seed", "--num-threads=2",
        ])  # fmt: skip
        wait_for("munged listens", (folder / "munge.socket.2").exists)

    def _controller_answers(self) -> bool:
        assert self.controller.is_running("slurmctld"), self.controller.log("slurmctld")
        return self.run("scontrol", "ping", check=False).stdout.rstrip().endswith("UP")


@contextmanager
def running(
    specs: Sequence[NodeSpec] = DEFAULT_NODES,
    settings: Settings | None = None,
    files: Mapping[str, str] | None = None,
) -> Iterator[Cluster]:
    """Yield a running cluster in a temporary directory, which is removed however the tests end.

    `files` are executables that are installed in /etc/slurm before the start, beside the hook.
    """
    directory = Path(tempfile.mkdtemp(prefix="gpulease-slurm-"))
    remover = subprocess.Popen(
        ["sh", "-c", _REMOVE, "sh", str(directory)], stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL, start_new_session=True, cwd="/",
    )  # fmt: skip
    cluster = Cluster(directory, specs, settings or Settings())
    for name, text in {NAME: hook_text(SYSTEM_SOCKET), **(files or {})}.items():
        cluster.install(name, text)
    try:
        yield cluster.start()
    finally:
        cluster.stop()
        remover.communicate()


def obstacle() -> str | None:
    """Return why no cluster can run here, or None."""
    missing = [it for it in ("slurmctld", "slurmd", "srun", "munged") if not _is_installed(it)]
    return f"Slurm is not installed: no {', '.join(missing)}" if missing else machines.obstacle()


def _is_installed(program: str) -> bool:
    return shutil.which(program, path=f"{os.defpath}:/usr/sbin:/sbin") is not None


def _free_ports(specs: Sequence[NodeSpec]) -> Ports:
    """Return ports that nothing listens on now."""
    return Ports(free_port(), {spec.name: free_port() for spec in specs})


def main() -> None:
    """Run a cluster until Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m slurm.cluster", description=__doc__)
    parser.add_argument("--directory", type=Path, required=True, help="kept afterwards")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--gpus", default="2x24G", help="of each node, as gpuleased --simulate")
    parser.add_argument("--slurm-lines", default="", help="added to slurm.conf")
    options = parser.parse_args()
    if why := obstacle():
        sys.exit(f"cannot start a cluster: {why}")
    options.directory.mkdir(parents=True, exist_ok=True)
    specs = [NodeSpec(f"n{number}", options.gpus) for number in range(1, options.nodes + 1)]
    settings = Settings(slurm_lines=options.slurm_lines)
    cluster = Cluster(options.directory.resolve(), specs, settings)
    try:
        cluster.start()
        print(_usage(cluster), flush=True)
        signal.pause()
    except KeyboardInterrupt:
        pass
    finally:
        cluster.stop()


def _usage(cluster: Cluster) -> str:
    """Write a script for each user and machine, and say how to use them."""
    places = [(user, node) for user in ("alice", "bob") for node in (None, *cluster.nodes)]
    for user, node in [*places, *(("root", node) for node in (None, *cluster.nodes))]:
        command = shlex.join(cluster.command(user=user, node=node, env={"TERM": "xterm"}))
        script = cluster.directory / "on" / f"{node or 'login'}-{user}"
        script.parent.mkdir(exist_ok=True)
        script.write_text(f'#!/bin/sh\n[ $# -gt 0 ] || set -- bash\nexec {command} "$@"\n')
        script.chmod(0o755)
    here = cluster.directory
    return (
        f"The cluster is up; Ctrl-C ends it. Run commands, or a shell without one:\n"
        f"  {here}/on/login-alice srun --gres=shard:16 hostname\n"
        f"  {here}/on/n1-root gpulease status\n"
        f"Files: {here}/slurm is /etc/slurm, {here}/home is /home, logs are {here}/*/*.log"
    )


if __name__ == "__main__":
    main()
