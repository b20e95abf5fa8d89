"""A Debian on disk, built once and kept outside the repository, for machines to be booted from.

In it, besides systemd and python3, are two users and a virtual environment with all that gpulease
depends on, so that a test only has to put gpulease itself there. Its name carries a hash of the
recipe: another recipe is another directory.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
RELEASE = os.environ.get("GPULEASE_TEST_DEBIAN", "12")
SUITE, PYTHON, _NAME = {
    "12": ("bookworm", "3.11", "systemd-root"),
    "13": ("trixie", "3.13", "systemd-13-root"),
}[RELEASE]
"""The Debian, the Python that it comes with, and where it is kept."""
PACKAGES = (
    *("systemd", "systemd-sysv", "dbus", "procps", "python3", "python3-venv"),
    # Users have a systemd instance of their own, and sessions of logind.
    *("dbus-user-session", "libpam-systemd"),
)
USERS = {"alice": 2001, "bob": 2002}
IDLE = (
    *("console-getty.service", "apt-daily.timer", "apt-daily-upgrade.timer"),
    *("dpkg-db-backup.timer", "e2scrub_all.timer", "fstrim.timer"),
)
NEEDED = ("debootstrap", "systemd-nspawn", "nsenter", "mount")
ENVIRONMENT = "/opt/gpulease"
"""Where docs/admin.md tells admins to install gpulease."""
_BUILD_WITHIN_S = 900
_PATH = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LC_ALL": "C.UTF-8",
}
_RECIPE = Path(__file__).read_bytes()


class NoDebian(Exception):
    """There is no archive to fetch one from, or it cannot be unpacked here."""


def dependencies() -> list[str]:
    """Return what pyproject.toml says that gpulease, its daemon and its web page need."""
    with (REPOSITORY / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *extras["daemon"], *extras["web"]]


def obstacle() -> str | None:
    """Return why no machine can be booted here, or None."""
    if os.geteuid() != 0:
        return "a machine is built and booted by root alone"
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        hint = "apt-get install systemd-container debootstrap"
        return f"not here: {', '.join(missing)}; try: {hint}"
    if Path("/proc/self/uid_map").read_text().split()[2] != "4294967295":
        return "only root of the whole machine can mount what this needs"
    return None


def cached_root() -> Path:
    """Return the directory of the Debian, building it if it is not there yet."""
    return cached(_NAME, _RECIPE + "\n".join(dependencies()).encode(), _build)


def cached(name: str, recipe: bytes, build: Callable[[Path], None]) -> Path:
    """Return a directory that `build` fills, once for each recipe. Raises: NoDebian."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpulease"
    cache.mkdir(parents=True, exist_ok=True)
    made = cache / f"{name}-{hashlib.sha256(recipe).hexdigest()[:12]}"
    with _lock(cache / f"{name}.lock"):
        if not made.is_dir():
            # Built under another name: what has the right one is whole.
            fresh = cache / f"{made.name}.building"
            shutil.rmtree(fresh, ignore_errors=True)
            try:
                build(fresh)
            except BaseException:
                shutil.rmtree(fresh, ignore_errors=True)
                raise
            fresh.rename(made)
            for other in cache.glob(f"{name}-*/"):
                if other != made:
                    shutil.rmtree(other)
    return made


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(root: Path) -> None:
    debootstrap(root, SUITE, *PACKAGES)
    for user, uid in USERS.items():
        inside(root, "useradd", "--create-home", "--shell=/bin/sh", f"--uid={uid}", user)
    inside(root, "groupadd", "--gid=3000", "lab")
    inside(root, "usermod", "--append", "--groups=lab", "alice")
    # A getty on a console that nobody looks at, and timers that have nothing to do here.
    inside(root, "systemctl", "mask", *IDLE)
    (root / "etc/machine-id").write_text("")
    wheels = root / "wheels"
    download(wheels, *dependencies())
    inside(root, "python3", "-m", "venv", ENVIRONMENT)
    install(root, *dependencies())
    shutil.rmtree(wheels)
    shutil.rmtree(root / "var/cache/apt", ignore_errors=True)


def debootstrap(root: Path, suite: str, *packages: str) -> None:
    """Unpack a small Debian with some packages. Raises: NoDebian."""
    try:
        run("debootstrap", "--variant=minbase", f"--include={','.join(packages)}", suite, str(root))
    except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
        raise NoDebian(error) from error


def download(wheels: Path, *requirements: str) -> None:
    """Fetch wheels that fit the Debian, whatever python runs this."""
    platforms = [f"--platform={tag}_{os.uname().machine}" for tag in _TAGS]
    run(
        *(sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(wheels)),
        *("--only-binary=:all:", f"--python-version={PYTHON}", *platforms, *requirements),
    )


_TAGS = ("manylinux_2_34", "manylinux_2_28", "manylinux_2_17", "manylinux2014", "linux")


def install(root: Path, *requirements: str) -> None:
    """Install from the wheels in /wheels, with the pip of the environment, without a network."""
    inside(
        root,
        *(f"{ENVIRONMENT}/bin/pip", "--disable-pip-version-check", "install", "--quiet"),
        *("--no-index", "--find-links=/wheels", *requirements),
    )


def inside(root: Path, *command: str) -> str:
    """Run a command in a Debian that is not booted, as root, and return what it says."""
    return run("chroot", str(root), *command, clean=True)


def run(*command: str, clean: bool = False) -> str:
    """Run a command to its end, and fail with what it said; `clean` gives it no environment."""
    done = subprocess.run(
        command, check=False, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=_BUILD_WITHIN_S,
        env=_PATH if clean else None,
    )  # fmt: skip
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}"
    return done.stdout
