"""Containers without a registry: an empty root file system, on which this machine's own lies."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from daemon_rig import wait_for

PYTHON = "/usr/bin/python3"
_HOSTS = [each for each in ("/usr", "/lib", "/lib64", "/bin", "/etc") if Path(each).exists()]
OF_THE_HOST = [word for each in _HOSTS for word in ("--volume", f"{each}:{each}:ro")]
"""Options that mount the programs of this machine, Python among them."""
_LIMITS = 'default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]'


def root_of(folder: Path) -> Path:
    """Make the root file system of a container."""
    root = folder / "root"
    for name in ("proc", "sys", "dev", "tmp", "run", "root", *(each[1:] for each in _HOSTS)):
        (root / name).mkdir(parents=True, exist_ok=True)
    return root


@dataclass(frozen=True)
class Podman:
    """How podman is called in a folder of its own."""

    folder: Path
    runtime: str

    def run(self, *words: str, options: Sequence[str] = ()) -> list[str]:
        """Return a command that runs `words` in a container."""
        root = ("--rootfs", str(self.folder / "root"))
        begin = self.command("run", "--rm", "--network", "none")
        return [*begin, *OF_THE_HOST, *options, *root, *words]

    def command(self, *words: str) -> list[str]:
        return [
            *(
                "podman",
                "--runtime",
                self.runtime,
                "--cgroup-manager",
                "cgroupfs",
                "--storage-driver",
                "vfs",
            ),
            *("--root", str(self.folder / "storage"), "--runroot", str(self.folder / "run")),
            *("--tmpdir", str(self.folder / "tmp"), *words),
        ]

    def environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
            "XDG_CONFIG_HOME": str(self.folder / "config"),
            "XDG_RUNTIME_DIR": str(self.folder / "xdg"),
            "CONTAINERS_CONF": str(self.folder / "containers.conf"),
        }


@contextmanager
def podman_of(user: int = 0, runtime: str | None = None) -> Iterator[Podman]:
    """Yield a podman for a user, in a folder of its own outside of which it leaves nothing."""
    # Podman takes short paths only.
    with tempfile.TemporaryDirectory(prefix="glpod-", ignore_cleanup_errors=True) as name:
        made = Podman(Path(name), runtime or str(working_runtime()))
        root_of(made.folder)
        (made.folder / "xdg").mkdir()
        (made.folder / "containers.conf").write_text(f"[containers]\n{_LIMITS}\n")
        subprocess.run(["chown", "-R", str(user), name], check=True)
        try:
            yield made
        finally:
            remove = made.command("rm", "--all", "--force", "--time", "0")
            subprocess.run(
                remove, env=made.environment(), check=False, timeout=120, user=user, group=user,
                cwd="/",
            )  # fmt: skip
            # The process that keeps the namespaces of a user without root.
            for pause in made.folder.rglob("pause.pid"):
                with suppress(ProcessLookupError):
                    os.kill(int(pause.read_text()), signal.SIGKILL)


@cache
def working_runtime() -> str | None:
    """Return an OCI runtime that works here; none in many containers, and without podman."""
    if os.geteuid() != 0 or not shutil.which("podman") or not Path(PYTHON).exists():
        return None
    return next((each for each in ("crun", "runc") if shutil.which(each) and _works(each)), None)


def _works(runtime: str) -> bool:
    with podman_of(runtime=runtime) as made:
        return subprocess.run(made.run("/bin/true"), env=made.environment(), check=False,
                              capture_output=True, timeout=120).returncode == 0  # fmt: skip


@contextmanager
def docker_in(folder: Path) -> Iterator[dict[str, str] | None]:
    """Yield the environment of docker clients of a server with the image `here`; None without."""
    folder.chmod(0o755)
    socket, log = folder / "docker.sock", folder / "log"
    with log.open("wb") as said:
        server = subprocess.Popen(
            ["dockerd", "--host", f"unix://{socket}", "--data-root", str(folder / "data"),
             "--exec-root", str(folder / "exec"), "--pidfile", str(folder / "pid"),
             "--iptables=false", "--bridge=none", "--storage-driver", "vfs"],
            stdout=said, stderr=said,
        )  # fmt: skip
    environment = {"PATH": os.environ["PATH"], "DOCKER_HOST": f"unix://{socket}"}
    try:
        wait_for("docker listens", lambda: server.poll() is not None or _listens(environment))
        if server.poll() is not None:
            yield None
            return
        socket.chmod(0o666)
        _import(root_of(folder), environment)
        yield environment
    finally:
        server.terminate()
        server.wait(120)


def _listens(environment: dict[str, str]) -> bool:
    asked = subprocess.run(
        ["docker", "version", "--format", "json"], env=environment, check=False, capture_output=True
    )
    return asked.returncode == 0


def _import(root: Path, environment: dict[str, str]) -> None:
    packed = subprocess.run(["tar", "-C", str(root), "-c", "."], check=True, capture_output=True)
    subprocess.run(
        ["docker", "import", "-", "here"], input=packed.stdout, env=environment, check=True,
        capture_output=True,
    )  # fmt: skip


def cdi_spec(uuid: str) -> str:
    """Return a specification that shows a container of the GPU `uuid` by a variable."""
    edits = {"env": [f"INJECTED={uuid}"]}
    return json.dumps({
        "cdiVersion": "0.5.0", "kind": "nvidia.com/gpu",
        "devices": [{"name": uuid, "containerEdits": edits}],
    })  # fmt: skip
