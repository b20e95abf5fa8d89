"""The Debian of tests/system with a kernel of its own, under qemu: cgroups of version 2 with all
controllers, four CPUs and little RAM, whatever the host has.

The processor runs it where it can (KVM); else it is emulated, and all takes twenty times as long.
It is reached over ssh, on loopback.
"""

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from daemon_rig import free_port, wait_for
from system import root
from system.machine import Machine

USERS = {**root.USERS, "carol": 2003, "dave": 2004}
CPUS, RAM_MIB = 4, 2048
NEEDED = ("qemu-system-x86_64", "ssh", "ssh-keygen", "mke2fs")
_PACKAGES = ("linux-image-cloud-amd64", "openssh-server", "initramfs-tools", "zstd")
_DISK = "4G"
_BOOTS_WITHIN_S = 600.0
_RUNS_WITHIN_S = 900.0
_NETWORK = "[Match]\nName=e*\n[Network]\nAddress=10.0.2.15/24\nGateway=10.0.2.2\n"
_SSHD = "UsePAM no\nUseDNS no\nMaxSessions 64\nMaxStartups 64\n"
_RECIPE = Path(__file__).read_bytes()


def obstacle() -> str | None:
    """Return why no machine can be booted here, or None."""
    if os.uname().machine != "x86_64":
        return "its kernel is for x86_64"
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        hint = "apt-get install qemu-system-x86 openssh-client e2fsprogs"
        return f"not here: {', '.join(missing)}; try: {hint}"
    return root.obstacle()


def has_kvm() -> bool:
    """Return whether the processor runs guests; a virtual machine may have /dev/kvm without it."""
    flags = set(Path("/proc/cpuinfo").read_text().split())
    return bool(flags & {"vmx", "svm"}) and os.access("/dev/kvm", os.R_OK | os.W_OK)


def cached_layer(debian: Path) -> Path:
    """Return what a kernel and sshd add to the Debian, with both for qemu beside it.

    Raises: NoDebian.
    """
    recipe = _RECIPE + str(debian).encode()
    return root.cached(f"vm-{root.RELEASE}", recipe, lambda folder: _build(debian, folder))


def _build(debian: Path, folder: Path) -> None:
    machine = Machine(folder, [debian])
    machine.mount()
    try:
        machine.write("etc/systemd/network/vm.network", _NETWORK)
        machine.write("etc/ssh/sshd_config.d/vm.conf", _SSHD)
        shutil.copy("/etc/resolv.conf", machine.root / "etc/resolv.conf")
        for command in (
            ("apt-get", "update", "-qq"),
            ("apt-get", "install", "-qq", "-y", "--no-install-recommends", *_PACKAGES),
            ("systemctl", "enable", "systemd-networkd"),
        ):
            root.inside(machine.root, "env", "DEBIAN_FRONTEND=noninteractive", *command)
        for user in USERS.keys() - root.USERS.keys():
            root.inside(machine.root, "useradd", "--create-home", f"--uid={USERS[user]}", user)
        for name in ("vmlinuz", "initrd.img"):
            (found,) = (machine.root / "boot").glob(f"{name}-*")
            shutil.copy(found, folder / name)
            found.unlink()
        shutil.rmtree(machine.root / "var/cache/apt")
    except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
        raise root.NoDebian(error) from error
    finally:
        machine.remove()


class VirtualMachine(Machine):
    """One machine, on a disk of its own."""

    uids: ClassVar = USERS

    def __init__(self, folder: Path, layer: Path, lower: Sequence[Path]) -> None:
        """`layer` is that of `cached_layer`, which has the kernel, and is one of `lower`."""
        super().__init__(folder, lower)
        self._layer = layer
        self._port = free_port()
        self._qemu: subprocess.Popen[bytes] | None = None

    def make_disk(self) -> None:
        """Write the disk: the layers, and the key with which it is reached."""
        folder = self.folder
        folder.mkdir(exist_ok=True)
        root.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key"))
        self.mount()
        try:
            self.root.joinpath("root/.ssh").mkdir(mode=0o700, exist_ok=True)
            super().write("root/.ssh/authorized_keys", (folder / "key.pub").read_text())
            root.run("mke2fs", "-q", "-t", "ext4", "-d", str(self.root), self._disk, _DISK)
        finally:
            subprocess.run(["umount", str(self.root)], check=True)

    @property
    def _disk(self) -> str:
        return str(self.folder / "disk")

    def boot(self) -> None:
        """Boot, and return when all that is enabled has been started, or has failed to."""
        with (self.folder / "console").open("ab") as console:
            self._qemu = subprocess.Popen(
                self._command_of_qemu(), stdin=subprocess.DEVNULL, stdout=console, stderr=console,
                start_new_session=True,
            )  # fmt: skip
        done = ("running", "degraded")
        wait_for(f"booted\n{self.console()}", lambda: self._state() in done, _BOOTS_WITHIN_S)

    def _command_of_qemu(self) -> list[str]:
        how = ["-accel", "kvm", "-cpu", "host"]
        if not has_kvm():
            how = ["-accel", "tcg,thread=multi,tb-size=512", "-cpu", "max"]
        return [
            # However the tests end, the machine ends with them.
            "setpriv", "--pdeathsig=KILL", "qemu-system-x86_64", *how,
            "-smp", str(CPUS), "-m", str(RAM_MIB), "-nographic", "-no-reboot",
            "-kernel", str(self._layer / "vmlinuz"), "-initrd", str(self._layer / "initrd.img"),
            "-append", "console=ttyS0 root=/dev/vda rw mitigations=off",
            "-drive", f"file={self._disk},format=raw,if=virtio,cache=unsafe",
            "-netdev", f"user,id=net,restrict=on,hostfwd=tcp:127.0.0.1:{self._port}-:22",
            "-device", "virtio-net-pci,netdev=net,romfile=",
        ]  # fmt: skip

    def is_up(self) -> bool:
        return self._qemu is not None and self._qemu.poll() is None

    def _state(self) -> str:
        assert self.is_up(), self.console()
        return super()._state()

    def _command(self, command: Sequence[str], user: str, environment: dict[str, str]) -> list[str]:
        options = {
            "ControlMaster": "auto",
            "ControlPath": f"/tmp/{self.name}",
            "ControlPersist": "60",
            "StrictHostKeyChecking": "no",
            "UserKnownHostsFile": "/dev/null",
            "ConnectTimeout": "60",
        }
        inside = shlex.join(self._as_user(command, user, environment))
        return [
            *("ssh", "-q", "-F", "none", "-i", str(self.folder / "key"), "-p", str(self._port)),
            *(f"-o{name}={value}" for name, value in options.items()),
            *("root@127.0.0.1", inside),
        ]

    def write(self, path: str, text: str) -> None:
        """Write a file, below `/`, and make its directory."""
        where = shlex.quote(f"/{path}")
        script = f'mkdir -p "$(dirname {where})"; printf %s {shlex.quote(text)} > {where}'
        self.run("sh", "-c", script)

    def power_off(self) -> None:
        self.run("systemctl", "poweroff", check=False)
        assert self._qemu is not None
        self._qemu.wait(_BOOTS_WITHIN_S)

    def cut_power(self) -> None:
        if self._qemu is not None:
            self._qemu.kill()
            self._qemu.wait()
