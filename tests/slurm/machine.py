"""A machine made of namespaces: its name, processes, files and devices are private.

The files are this machine's, with a copy-on-write layer over /etc and /var and private /run, /tmp,
/dev and /home. So each daemon finds its normal places, and nothing of this machine is changed. The
network is shared.

The first process reads a pipe that the tests hold. When they end, however they end, the kernel ends
it, all processes of the machine, and all mounts.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from daemon_rig import PATIENCE_S, wait_for

USERS = {"root": 0, "alice": 47_201, "bob": 47_202}
"""Uids, and equal gids, of the users of each machine; this machine's own users stay unchanged."""

GPU_MAJOR = 60
"""For local and experimental use: linux/Documentation/admin-guide/devices.txt."""

_NSENTER = shutil.which("nsenter") or "nsenter"
_REPOSITORY = Path(__file__).parents[2]
_NEEDED = (_REPOSITORY, Path(sys.prefix), Path(sys.base_prefix))
"""What the users of a machine must be able to read."""
_PATH = (
    f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)

CGROUPS = ("freezer", "devices", "memory")
"""Hierarchies of cgroups v1 that a machine has for itself, where it is asked to."""
_CGROUP_ROOT = Path("/sys/fs/cgroup")

# Puts itself into a new cgroup of each hierarchy, and runs the rest.
# $1: the cluster's name, $2: the machine's, $3: hierarchies.
_ENTER_NEW_CGROUPS = """
set -eu
for each in $3; do
    here=$(sed -n "s/^[0-9]*:$each://p" /proc/self/cgroup)
    new=/sys/fs/cgroup/$each${here%/}/$1/$2
    mkdir -p "$new"
    find "$new" -mindepth 1 -depth -type d -exec rmdir {} +
    echo 0 >"$new/cgroup.procs"
done
shift 3
exec "$@"
"""

# The same, on a machine that has them. $1: hierarchies.
_ENTER_CGROUPS = """
for each in $1; do echo 0 >"/sys/fs/cgroup/$each/cgroup.procs"; done
shift
exec "$@"
"""

REMOVE_CGROUPS = f"""
for each in {" ".join(CGROUPS)}; do
    find "/sys/fs/cgroup/$each" -depth -type d -path "*/$(basename "$1")*" -exec rmdir {{}} +
done 2>/dev/null
"""
"""Removes the empty cgroups of a cluster. $1: its directory."""

# $1: name, $2: its directory, $3: the cluster's directory, $4: number of GPUs, $5: major of GPUs,
# $6: "own" for processes of its own, $7: hierarchies of cgroups to mount, then pairs of a directory
# and the one that is mounted over it.
_BOOT = """
set -eu
name=$1 mine=$2 shared=$3 gpus=$4 major=$5 processes=$6 cgroups=$7
shift 7
hostname "$name"
if [ "$processes" = own ]; then
    mount -t proc proc /proc
    cat /proc/sys/kernel/random/uuid >"$mine/boot_id"
    mount --bind "$mine/boot_id" /proc/sys/kernel/random/boot_id
fi
for each in $cgroups; do
    umount "/sys/fs/cgroup/$each"
    mount -t cgroup -o "$each" gpulease-test "/sys/fs/cgroup/$each"
done
for part in etc var; do
    written=$shared/written/$name/$part
    mkdir -p "$written/upper" "$written/work"
    mount -t overlay gpulease-test "/$part" -o \\
        "lowerdir=$shared/layers/$part:/$part,upperdir=$written/upper,workdir=$written/work"
done
mount -t tmpfs -o mode=755 gpulease-test "$mine/dev"
cd "$mine/dev"
umask 0
mknod null c 1 3; mknod zero c 1 5; mknod full c 1 7
mknod random c 1 8; mknod urandom c 1 9; mknod tty c 5 0; mknod ptmx c 5 2
umask 022
ln -s /proc/self/fd fd
ln -s fd/0 stdin; ln -s fd/1 stdout; ln -s fd/2 stderr
mkdir pts shm
mount --bind /dev/pts pts
mount -t tmpfs -o mode=1777 gpulease-test shm
gpu=0
while [ "$gpu" -lt "$gpus" ]; do
    mknod -m 666 "nvidia$gpu" c "$major" "$gpu"
    gpu=$((gpu + 1))
done
mount --rbind "$mine/dev" /dev
mount --bind "$shared/slurm" /etc/slurm
mount --bind "$shared/munge" "$mine/run/munge"
mount --rbind "$mine/run" /run
mount --bind "$shared/home" /home
while [ $# -gt 1 ]; do mount --rbind "$2" "$1"; shift 2; done
cd /
echo booted
# Orphans are reaped by the kernel where their new parent ignores their end.
trap '' CHLD
exec cat >/dev/null
"""

# What the boot needs and a container may deny.
_TRY = f"""
set -eu
mount -t tmpfs gpulease-test /mnt
mkdir /mnt/upper /mnt/work
mount -t overlay gpulease-test /etc -o lowerdir=/etc,upperdir=/mnt/upper,workdir=/mnt/work
mknod /mnt/gpu c {GPU_MAJOR} 0
"""

# $1: the directory to mount it on, $2: a directory to lay over /usr, or nothing.
_MOUNT_DISK = """
set -eu
[ -z "$2" ] || mount -t overlay -o "lowerdir=$2:/usr" gpulease-test /usr
mount -t tmpfs -o mode=755 gpulease-test "$1"
echo mounted
exec cat >/dev/null
"""


class Disk:
    """What the machines of a cluster write to /etc and /var: a tmpfs that only they see.

    An overlay's upper layer cannot be on an overlay, such as the root of a container.
    """

    def __init__(self, shared: Path, programs: Path | None = None) -> None:
        """`programs` are laid over /usr."""
        self._folder = shared / "written"
        self._programs = programs
        self._unshare: subprocess.Popen[bytes] | None = None

    def mount(self) -> None:
        self._folder.mkdir(exist_ok=True)
        self._unshare = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", _MOUNT_DISK, "sh", str(self._folder),
             str(self._programs or "")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/", start_new_session=True,
        )  # fmt: skip
        assert self._unshare.stdout is not None
        assert self._unshare.stdout.readline() == b"mounted\n"

    def unmount(self) -> None:
        """Lose what was written, as soon as no machine is up."""
        if self._unshare is not None:
            self._unshare.communicate()

    def enter(self) -> list[str]:
        """Return the command that runs another one where the disk is mounted."""
        assert self._unshare is not None, "the disk is not mounted"
        return [_NSENTER, f"--target={self._unshare.pid}", "--mount"]


@dataclass
class Daemon:
    """A daemon inside a machine: as Popen, with its pid as this machine sees it."""

    popen: subprocess.Popen[bytes]
    """nsenter(1), which waits for it."""
    pid: int

    def kill(self, number: int = signal.SIGKILL) -> None:
        """End the daemon; what it launched goes on."""
        if self.popen.poll() is None:
            os.kill(self.pid, number)
        self.popen.wait(PATIENCE_S)


@dataclass
class Machine:
    """One machine: booted, used, crashed, booted again, always with the same files."""

    name: str
    shared: Path
    """The cluster's directory."""
    disk: Disk
    gpus: int = 0
    own_processes: bool = True
    """Without processes of its own, a command's pid is that of the Popen that started it."""
    own_cgroups: bool = False
    _unshare: subprocess.Popen[bytes] | None = None
    _first: int = 0
    _daemons: dict[str, Daemon] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.shared / self.name

    @property
    def is_up(self) -> bool:
        return self._unshare is not None and self._unshare.poll() is None

    def path(self, inside: str) -> Path:
        """Return the path from outside of an absolute path on the running machine."""
        return Path(f"/proc/{self._first}/root{inside}")

    def boot(self) -> None:
        """Boot, and return when the files are in place."""
        hidden = self._hidden()
        self._make_directories()
        kinds = self._namespaces()
        kinds += ["--fork", "--kill-child"] if self.own_processes else []
        script = ["sh", "-c", _BOOT, "sh", self.name, str(self.folder), str(self.shared)]
        script += [str(self.gpus), str(GPU_MAJOR), "own" if self.own_processes else "shared"]
        words = [self._cgroups, *(str(word) for pair in hidden.items() for word in pair)]
        enter = ["sh", "-c", _ENTER_NEW_CGROUPS, "sh", self.shared.name, self.name, self._cgroups]
        with (self.folder / "boot.log").open("ab") as log:
            self._unshare = subprocess.Popen(
                [*self.disk.enter(), *enter, "unshare", *kinds, *script, *words],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, cwd="/",
                start_new_session=True,
            )  # fmt: skip
        assert self._unshare.stdout is not None
        line = self._unshare.stdout.readline()
        assert line == b"booted\n", (self.folder / "boot.log").read_text()
        self._first = child_of(self._unshare) if self.own_processes else self._unshare.pid

    def crash(self) -> None:
        """Lose all processes at once, as without electricity; what was written is kept."""
        if self._unshare is None:
            return
        if self._unshare.poll() is None:
            os.kill(self._first, signal.SIGKILL)
        self._unshare.communicate(timeout=PATIENCE_S)
        for daemon in self._daemons.values():
            daemon.popen.wait(PATIENCE_S)
        self._daemons.clear()
        # A machine boots with an empty /run.
        empty(self.folder / "run")

    def command(
        self, argv: Sequence[str], user: str, cwd: str | None, environment: Mapping[str, str]
    ) -> list[str]:
        """Return the command line that runs `argv` inside."""
        assert self.is_up, f"{self.name} is down"
        home = "/root" if user == "root" else f"/home/{user}"
        variables = {
            "PATH": _PATH, "HOME": home, "USER": user, "LOGNAME": user, "SHELL": "/bin/sh",
            "LC_ALL": "C.UTF-8", **environment,
        }  # fmt: skip
        become = [f"--reuid={USERS[user]}", f"--regid={USERS[user]}", "--init-groups"]
        return [
            *(_NSENTER, f"--target={self._first}", *self._namespaces()),
            *(["sh", "-c", _ENTER_CGROUPS, "sh", self._cgroups] if self.own_cgroups else []),
            # However the tests end, the command ends with them.
            *("setpriv", *(become if user != "root" else []), "--pdeathsig=KILL"),
            *("env", "-i", f"--chdir={cwd or home}"),
            *(f"{name}={value}" for name, value in variables.items()),
            *argv,
        ]

    def start(
        self, name: str, argv: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> Daemon:
        """Start a daemon as root, which stays in the foreground; `log` has its output."""
        with (self.folder / f"{name}.log").open("ab") as log:
            popen = subprocess.Popen(
                self.command(argv, "root", "/", environment or {}), stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self._daemons[name] = Daemon(popen, child_of(popen))
        return self._daemons[name]

    def daemon(self, name: str) -> Daemon:
        return self._daemons[name]

    def is_running(self, name: str) -> bool:
        return name in self._daemons and self._daemons[name].popen.poll() is None

    def log(self, name: str) -> str:
        """Return what a daemon wrote."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    @property
    def _cgroups(self) -> str:
        return " ".join(CGROUPS) if self.own_cgroups else ""

    def _namespaces(self) -> list[str]:
        """Return the options of unshare(1) and nsenter(1)."""
        kinds = ["--mount", "--uts", "--ipc"]
        kinds += ["--pid"] if self.own_processes else []
        return kinds + (["--cgroup"] if self.own_cgroups else [])

    def _make_directories(self) -> None:
        for part in ("dev", "run/munge"):
            (self.folder / part).mkdir(parents=True, exist_ok=True)

    def _hidden(self) -> dict[Path, Path]:
        """Return what to mount over directories: /tmp, and those that users cannot enter.

        What users need below them is mounted again, by `boot`'s script in the same order.
        """
        private = self.folder / "tmp"
        private.mkdir(parents=True, exist_ok=True)
        private.chmod(0o1777)
        covers = {Path("/tmp"): private}
        for needed in _NEEDED:
            closed = [it for it in needed.parents if not it.stat().st_mode & 0o001]
            if closed:
                covers.setdefault(closed[-1], self.folder / "closed" / str(len(covers)))
        binds: dict[Path, Path] = {}
        for cover, by in covers.items():
            by.mkdir(parents=True, exist_ok=True)
            for needed in _NEEDED:
                if needed.is_relative_to(cover):
                    place = by / needed.relative_to(cover)
                    place.mkdir(parents=True, exist_ok=True)
                    binds[place] = needed
        # Last /tmp: this cluster's own directory may be in it.
        return binds | dict(sorted(covers.items(), key=lambda it: it[0] == Path("/tmp")))


def obstacle() -> str | None:
    """Return why no machine can run here, or None."""
    if os.geteuid() != 0:
        return "a machine of namespaces takes root"
    tried = subprocess.run(
        ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "sh", "-c", _TRY],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    why = (tried.stderr.strip() or "it failed").splitlines()[0]
    return f"namespaces and mounts are not permitted: {why}" if tried.returncode else None


def has_cgroups() -> bool:
    """Tell whether machines can have cgroups; only version 1 can be divided among them."""
    return all((_CGROUP_ROOT / each / "cgroup.procs").exists() for each in CGROUPS)


def child_of(popen: subprocess.Popen[bytes]) -> int:
    """Return the child of a running unshare(1) or nsenter(1)."""
    children = Path(f"/proc/{popen.pid}/task/{popen.pid}/children")

    def first() -> int | None:
        assert popen.poll() is None, popen.args
        return next((int(it) for it in children.read_text().split()), None)

    return wait_for("a process in the namespace", first)


def empty(folder: Path) -> None:
    """Remove what is in a directory."""
    subprocess.run(["find", str(folder), "-mindepth", "1", "-delete"], check=True)
