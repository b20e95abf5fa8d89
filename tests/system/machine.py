"""A machine with a real systemd: booted by systemd-nspawn on a copy-on-write of the Debian.

What the machine writes lies in a directory of its own and stays over a reboot; the Debian itself is
never written to. No network, and nothing of the host's init system is asked: the host may have
another one.
"""

import itertools
import json
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from daemon_rig import PATIENCE_S, wait_for

from .root import USERS

_BOOTS_WITHIN_S = 60.0
_LEAVES_WITHIN_S = 45.0
_NUMBERS = itertools.count(1)
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def nspawn(name: str, root: Path) -> list[str]:
    """Return the command that boots the machine."""
    return [
        # However the tests end, the machine ends with them.
        "setpriv", "--pdeathsig=KILL",
        "systemd-nspawn", f"--machine={name}", f"--directory={root}", "--boot", "--quiet",
        "--register=no", "--keep-unit", "--console=read-only", "--private-network",
        "--link-journal=no", "--resolv-conf=off", "--timezone=off",
        # Device rules are BPF programs on cgroups v2; without these they do nothing, silently.
        "--capability=CAP_BPF,CAP_PERFMON,CAP_NET_ADMIN", "--system-call-filter=bpf",
    ]  # fmt: skip


def _is_an_init(pid: str) -> bool:
    """Tell whether a process is the first of a PID namespace of its own, see proc(5) on NSpid."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return False
    numbers = next((line.split()[1:] for line in lines if line.startswith("NSpid:")), [])
    return len(numbers) > 1 and numbers[-1] == "1"


@dataclass
class Machine:
    """One machine: booted, used, powered off, booted again, always on the same disk."""

    folder: Path
    lower: Sequence[Path]
    """What it is a copy of, the topmost first."""
    uids: ClassVar[Mapping[str, int]] = USERS
    name: str = field(default_factory=lambda: f"gpulease-{os.getpid()}-{next(_NUMBERS)}")
    _nspawn: subprocess.Popen[bytes] | None = None
    _init: int | None = None

    @property
    def root(self) -> Path:
        """The machine's `/`, as the host sees it."""
        return self.folder / "root"

    @property
    def written(self) -> Path:
        """All that was changed since it was made, as an upper directory of overlayfs."""
        return self.folder / "upper"

    def mount(self) -> None:
        """Lay the machine's disk over the Debian."""
        for part in ("root", "upper", "work"):
            (self.folder / part).mkdir(parents=True, exist_ok=True)
        lower = ":".join(map(str, self.lower))
        options = f"lowerdir={lower},upperdir={self.written},workdir={self.folder / 'work'}"
        subprocess.run(
            ["mount", "-t", "overlay", "gpulease-test", "-o", options, str(self.root)], check=True
        )

    def boot(self) -> None:
        """Boot, and return when all that is enabled has been started, or has failed to."""
        if not self.root.is_mount():
            self.mount()
        with (self.folder / "console").open("ab") as console:
            self._nspawn = subprocess.Popen(
                nspawn(self.name, self.root),
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                env={**os.environ, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"},
                # A Ctrl-C is for pytest, which then powers off.
                start_new_session=True,
            )
        self._init = wait_for("systemd is there", self._child, _BOOTS_WITHIN_S)
        done = ("running", "degraded")
        wait_for(f"booted\n{self.console()}", lambda: self._state() in done, _BOOTS_WITHIN_S)

    def is_up(self) -> bool:
        return self._nspawn is not None and self._nspawn.poll() is None

    def _child(self) -> int | None:
        assert self._nspawn is not None
        assert self._nspawn.poll() is None, self.console()
        children = Path(f"/proc/{self._nspawn.pid}/task/{self._nspawn.pid}/children")
        # For a moment there is another one, which prepares the files and ends.
        inits = [child for child in children.read_text().split() if _is_an_init(child)]
        return int(inits[0]) if inits else None

    def _state(self) -> str:
        return self.run("systemctl", "is-system-running", check=False).stdout.strip()

    def console(self) -> str:
        """Return what it wrote on its console."""
        return (self.folder / "console").read_text(errors="replace")[-4000:]

    def run(
        self,
        *command: str,
        user: str = "root",
        check: bool = True,
        within_s: float = PATIENCE_S,
        environment: dict[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside, at home, as a user with all of their groups."""
        done = subprocess.run(
            self._command(command, user, environment or {}), check=False, text=True,
            capture_output=True, stdin=subprocess.DEVNULL, timeout=within_s,
        )  # fmt: skip
        assert not check or done.returncode == 0, (command, done.stdout, done.stderr)
        return done

    def open(self, *command: str, user: str = "root") -> subprocess.Popen[str]:
        """Start a command inside and leave it running; reads as text."""
        return subprocess.Popen(
            self._command(command, user, {}), text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def _command(self, command: Sequence[str], user: str, environment: dict[str, str]) -> list[str]:
        enter = ("nsenter", f"--target={self._init}", "--all", "--root", "--wd")
        return [*enter, *self._as_user(command, user, environment)]

    def _as_user(self, command: Sequence[str], user: str, environment: dict[str, str]) -> list[str]:
        """Return the command inside that starts `command`, at home and with this environment."""
        home = "/root" if user == "root" else f"/home/{user}"
        variables = {"PATH": _PATH, "HOME": home, "USER": user, "LC_ALL": "C.UTF-8", **environment}
        become = []
        if user != "root":
            become = [
                "setpriv",
                f"--reuid={self.uids[user]}",
                f"--regid={self.uids[user]}",
                "--init-groups",
            ]
        return [
            *(
                "env",
                "-i",
                f"--chdir={home}",
                *(f"{name}={value}" for name, value in variables.items()),
            ),
            *("timeout", "--kill-after=1", "300", *become, *command),
        ]

    def write(self, path: str, text: str) -> None:
        """Write a file, below `/`, and make its directory."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    # What a test asks about.

    def unit(self, unit: str, *names: str) -> dict[str, str]:
        """Return properties of a unit."""
        wanted = [f"--property={name}" for name in names]
        lines = self.run("systemctl", "show", unit, *wanted).stdout.splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def wait_for_unit(self, unit: str, **wanted: str) -> dict[str, str]:
        """Wait until properties of a unit have these values, and return them."""

        def there() -> dict[str, str] | None:
            found = self.unit(unit, *wanted)
            return found if found == wanted else None

        return wait_for(f"{unit} is {wanted}", there)

    def files(self) -> set[str]:
        """Return the paths of the disk, but for what systemd, python and dpkg keep themselves."""
        places = ("/etc", "/usr", "/opt", "/var/lib", "/var/log", "/run/gpulease", "/tmp", "/root")
        found = self.run("find", *places, check=False).stdout.splitlines()
        theirs = re.compile(
            r".*/__pycache__|/var/(lib|log)/(systemd|journal|private|dpkg)|/tmp/systemd-|/etc/\w+-$"
        )
        return {path for path in found if not theirs.match(path)}

    def journal(self, *arguments: str, user: str = "root") -> list[dict[str, Any]]:
        """Return entries of the journal."""
        # It fails where there is no entry to show, as grep does.
        done = self.run("journalctl", "--output=json", *arguments, user=user, check=False)
        return [json.loads(line) for line in done.stdout.splitlines()]

    # The end.

    def power_off(self) -> None:
        """Power off in order, as an admin does."""
        self._leave(signal.SIGRTMIN + 4)

    def cut_power(self) -> None:
        """Be gone at once, as without electricity."""
        self._leave(signal.SIGKILL)

    def _leave(self, number: int) -> None:
        if self._nspawn is None:
            return
        if self._init is not None and self._nspawn.poll() is None:
            # To the init in it: nspawn would pass on but a few.
            os.kill(self._init, number)
        try:
            self._nspawn.wait(_LEAVES_WITHIN_S)
        except subprocess.TimeoutExpired:
            os.kill(self._init or self._nspawn.pid, signal.SIGKILL)
            self._nspawn.wait(_LEAVES_WITHIN_S)
        self._nspawn, self._init = None, None

    def reboot(self) -> None:
        """Power off and boot again: the boot id is new, as after a real reboot."""
        self.power_off()
        self.boot()

    def remove(self) -> None:
        """Leave nothing of it on the host."""
        self.cut_power()
        if self.root.is_mount():
            subprocess.run(["umount", str(self.root)], check=True)
