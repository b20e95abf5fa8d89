"""Installs the systemd units of this environment, and removes them. `FILES` lists what goes where.

The unit of the web page is optional.

Also installs device rules for processes outside of jobs. The scope of a job denies it the GPUs of
others, but a user can start a process elsewhere: in the user's systemd instance, a login session,
or by cron or at. The rules deny GPUs there.
"""

import grp
import os
import platform
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import gpulease
from gpulease.config import (
    DATABASE_NAME,
    SYSTEM_CONFIG,
    SYSTEM_SOCKET,
    SYSTEM_STATE,
    Settings,
    read_settings,
)
from gpulease.daemon_packages import install_hint
from gpulease.errors import GpuleaseError, SetupFailed
from gpulease.host.state_dir import CRASH, JOBS
from gpulease.path_ownership import refuse_if_changeable
from gpulease.setup.requirements import check_labels, check_system
from gpulease.shim.record import read_with_life
from gpulease.store.store import count_jobs
from gpulease.units import counted
from gpulease.user_daemon import LOCK, SERVING

NAME = "50-gpulease.conf"
_RESTRICTED = {
    # Each user's sessions and systemd instance.
    "user-.slice": "Slice",
    # These run programs of users in their own units. Some distributions call cron crond.
    "cron.service": "Service",
    "crond.service": "Service",
    "atd.service": "Service",
}
_ROOT = "user-0.slice"
_EXCEPTED = "# Root may open all devices. This file replaces the one for all users.\n"


_INSTALLED = Path(__file__).parent / "systemd"
_IN_A_CHECKOUT = Path(__file__).parents[2] / "systemd"
SOURCES = _INSTALLED if _INSTALLED.is_dir() else _IN_A_CHECKOUT

_LIBRARIES = Path("/usr/local/lib")
UNITS = _LIBRARIES / "systemd/system"
"""For software that no package installs. Changes by the admin in /etc override it."""
FILES = {
    "gpuleased.service": UNITS / "gpuleased.service",
    "gpulease.slice": UNITS / "gpulease.slice",
    "gpulease.sysusers": Path("/usr/local/lib/sysusers.d/gpulease.conf"),
    "gpulease.tmpfiles": Path("/usr/local/lib/tmpfiles.d/gpulease.conf"),
}
SERVICE = "gpuleased.service"
WEB_SERVICE = "gpulease-web.service"
_WEB_UNIT = UNITS / WEB_SERVICE
GROUP = "gpulease"
_ROOTS = Path("/usr/local/sbin")
LINKS = (
    Path("/usr/local/bin/gpulease"),
    *(_ROOTS / name for name in ("gpuleased", "gpulease-setup", "gpulease-web")),
)
"""Where users, and root, find the programs."""
_PLACEHOLDER = "/opt/gpulease/bin/"
"""The directory of the programs in the unit files, which `install` replaces."""
_DROP_INS = tuple(
    Path("/etc/systemd/system") / f"{unit}.d" for unit in (SERVICE, "gpulease.slice", WEB_SERVICE)
)
_HIDDEN = tuple(map(Path, ("/home", "/root", "/run/user")))
"""The directories that ProtectHome=yes hides from the daemon."""
_SYSTEMD = Path("/run/systemd/system")
_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
"""For calls of system programs."""

Say = Callable[[str], None]
Confirm = Callable[[str], bool]
"""Shows what will be deleted, and returns whether the admin agrees."""


def install(
    say: Say,
    *,
    now: bool,
    restrict_users: bool | None = None,
    web: bool | None = None,
    is_package: bool = False,
) -> None:
    """Install or upgrade the units; `now` starts the services.

    `restrict_users` adds or removes the rules that deny users the GPUs outside of jobs, `web` the
    web page; None keeps the present state. A package of the system has units and programs of its
    own, which stay as they are.

    Raises:
        SetupFailed: this machine or this environment is unsuitable. Nothing was changed.
    """
    _check_machine()
    programs = Path(sys.prefix) / "bin"
    _check_environment(programs)
    has_web = web or (web is None and _WEB_UNIT.exists())
    if not is_package:
        _install_files(say, programs, has_web=has_web)
    if web is False:
        _remove_web(say, is_package=is_package)
    _restrict_users(say, restrict_users)
    _call("systemctl", "daemon-reload")
    for service in (SERVICE, WEB_SERVICE) if has_web else (SERVICE,):
        if now:
            _call("systemctl", "enable", service)
            # Restart, since after an upgrade the old program is still running. Jobs continue.
            _call("systemctl", "restart", service)
            say(f"started {service}; systemctl status {service} shows its state")
        else:
            say(f"next: systemctl enable --now {service} (after an upgrade: restart)")


def _install_files(say: Say, programs: Path, *, has_web: bool) -> None:
    if has_web:
        _check_web(programs)
    for source, target in FILES.items():
        _install_file(source, target, programs, say)
    if has_web:
        _install_file(WEB_SERVICE, _WEB_UNIT, programs, say)
    for link in LINKS:
        say(f"{_link(link, programs / link.name)} {link}")
    _call("systemd-sysusers", str(FILES["gpulease.sysusers"]))
    _call("systemd-tmpfiles", "--create", str(FILES["gpulease.tmpfiles"]))


def _install_file(source: str, target: Path, programs: Path, say: Say) -> None:
    text = (SOURCES / source).read_text().replace(_PLACEHOLDER, f"{programs}/")
    say(f"{write_file(target, text)} {target}")


def _check_web(programs: Path) -> None:
    """Check that the packages of the web page are installed."""
    program = [str(programs / "gpulease-web"), "--version"]
    if subprocess.run(program, check=False, capture_output=True, env=_ENVIRONMENT).returncode:
        raise SetupFailed(
            "cannot install the web page: its packages are not installed",
            install_hint("daemon", "web"),
        )


def _remove_web(say: Say, *, is_package: bool = False) -> None:
    """Stop the web page and remove its unit, if it is installed."""
    if not _WEB_UNIT.exists() and not is_package:
        return
    if _SYSTEMD.exists():
        _call("systemctl", "disable", "--now", WEB_SERVICE)
    _remove_file(_WEB_UNIT, say)


def _restrict_users(say: Say, wanted: bool | None) -> None:
    files = user_rules()
    had_rules = any(file.exists() for file in files)
    if wanted or (wanted is None and had_rules):
        for target, text in files.items():
            say(f"{write_file(target, text)} {target}")
    if wanted is False:
        for target in files:
            _remove_file(target, say)
    if wanted and not had_rules:
        say("from now on, users other than root can open GPUs only in gpulease jobs")
    if wanted is False and had_rules:
        say("users can open GPUs again after all of their sessions have ended")


def user_rules() -> Mapping[Path, str]:
    """Return the text of each drop-in that denies users the GPUs outside of jobs, by its path."""
    template = (SOURCES / "gpulease-users.conf").read_text()
    rules = {
        UNITS / f"{unit}.d" / NAME: template.replace("[SECTION]", f"[{section}]")
        for unit, section in _RESTRICTED.items()
    }
    return {**rules, UNITS / f"{_ROOT}.d" / NAME: _EXCEPTED}


def remove(
    say: Say, confirm: Confirm, *, purge: bool, force: bool, is_package: bool = False
) -> None:
    """Stop the daemon and remove what `install` installed; `purge` also removes the data.

    Raises:
        SetupFailed: jobs are running and `force` is not set, or the admin did not confirm the
            purge. Nothing was changed.
    """
    if os.geteuid() != 0:
        raise SetupFailed(
            "cannot remove gpulease: only root can do this", "try: sudo gpulease-setup ..."
        )
    try:
        settings = read_system_settings()
    except GpuleaseError:  # it must still be removable
        settings = Settings(state=SYSTEM_STATE)
    jobs = settings.state / JOBS
    running = sorted(
        int(each.name) for each in jobs.glob("*") if each.name.isdecimal() and _is_running(each)
    )
    if running and not force:
        shown = ", ".join(map(str, running[:10])) + (", ..." if len(running) > 10 else "")
        what = f"job {shown} is" if len(running) == 1 else f"the jobs {shown} are"
        raise SetupFailed(
            f"cannot remove gpulease: {what} running",
            "end them with gpulease cancel"
            + ("" if is_package else "; with --force they continue without supervision"),
        )
    if purge and not confirm(purge_notice(settings.state)):
        raise SetupFailed("cannot purge: not confirmed; nothing was changed")
    _remove_units(say, is_package=is_package)
    # Without this directory, users can start personal daemons.
    _remove_directory(SYSTEM_SOCKET.parent, say)
    if purge:
        _purge(settings, say)
    else:
        say(f"kept {settings.state}, {SYSTEM_CONFIG.parent} and the group {GROUP}; see --purge")
    if not is_package:
        say(f"the programs are in {sys.prefix}; to remove them, delete that directory")


def _is_running(job: Path) -> bool:
    found = read_with_life(job)
    # The shim of a very short job waits some seconds for the terminal of `gpulease run`.
    return found is not None and found[1] and found[0].exited is None


def _remove_units(say: Say, *, is_package: bool) -> None:
    _remove_web(say)
    if _SYSTEMD.exists() and is_package:
        # Whether they start at boot is kept, by the package.
        _call("systemctl", "stop", SERVICE, WEB_SERVICE)
    if _SYSTEMD.exists() and FILES[SERVICE].exists():
        _call("systemctl", "disable", "--now", SERVICE)
    for target in (*FILES.values(), *user_rules()):
        _remove_file(target, say)
    for link in LINKS:
        if link.is_symlink() and link.readlink() == Path(sys.prefix) / "bin" / link.name:
            _remove_file(link, say)
    if _SYSTEMD.exists():
        _call("systemctl", "daemon-reload")
        _call("systemctl", "reset-failed", SERVICE, WEB_SERVICE, must=False)


def purge_notice(state: Path) -> str:
    """Describe what a purge deletes."""
    found = count_jobs(state / DATABASE_NAME)
    if found is None:
        jobs = "all jobs on record (their number is unknown, since the database cannot be read)"
    else:
        jobs = ", ".join(
            (
                counted(found.waiting, "queued job"),
                counted(found.holds, "hold"),
                counted(found.running, "running job"),
                counted(found.ended, "ended job"),
            )
        )
    return (
        f"This deletes the database in {state}: {jobs}, with their output.\n"
        f"It also deletes the settings in {SYSTEM_CONFIG.parent}, the drop-ins of the units and "
        f"the group {GROUP}. Queued jobs will not run.\n"
    )


def _purge(settings: Settings, say: Say) -> None:
    remove_state(settings.state, say)
    for directory in (*_DROP_INS, SYSTEM_CONFIG.parent):
        _remove_directory(directory, say)
    try:
        grp.getgrnam(GROUP)
    except KeyError:
        return
    _call("groupdel", GROUP)
    say(f"removed the group {GROUP}")


def remove_state(state: Path, say: Say) -> None:
    """Remove the daemon's files from its state directory, which may contain other files."""
    _remove_directory(state / JOBS, say)
    files = (*state.glob(f"{DATABASE_NAME}*"), *state.glob(f"{SERVING}*"))
    for file in (*files, state / LOCK, state / CRASH):
        _remove_file(file, say)
    _remove_if_empty(state)


def read_system_settings() -> Settings:
    """Return the settings of the system's daemon.

    Raises:
        BadConfiguration: its file has mistakes.
    """
    path = SYSTEM_CONFIG if SYSTEM_CONFIG.exists() else None
    if path is not None:
        refuse_if_changeable(path)
    return read_settings(path, Settings())


def _check_machine() -> None:
    if os.geteuid() != 0:
        raise SetupFailed(
            "cannot install: only root can do this", "try: sudo gpulease-setup install"
        )
    if not _SYSTEMD.exists():
        raise SetupFailed(
            "cannot install: this machine was not booted with systemd",
            "run gpuleased as root under the service manager here; see docs/admin/install.md",
        )
    name = platform.freedesktop_os_release().get("PRETTY_NAME", "this system")
    check_system(name, _call("systemctl", "--version"), platform.release())


def _check_environment(programs: Path) -> None:
    """Check that only root can change this environment, and that all users can read it."""
    if not (programs / "gpuleased").exists():
        raise SetupFailed(
            f"cannot install: {programs}/gpuleased does not exist",
            "create an environment with python3 -m venv /opt/gpulease, and install gpulease there",
        )
    check_labels(Path(sys.prefix))
    # The python that a venv links to may be outside of its base directory.
    python = Path(sys.executable).resolve().parent
    places = {Path(sys.prefix), Path(sys.base_prefix), python, Path(gpulease.__file__).parent}
    for place in sorted(place.resolve() for place in places):
        for wrong in _wrong(place):
            raise SetupFailed(
                f"cannot install from {place}: {wrong}",
                "as root, create an environment with /usr/bin/python3 -m venv /opt/gpulease, and "
                "install gpulease there",
            )


def _wrong(place: Path) -> Iterator[str]:
    if any(place.is_relative_to(hidden) for hidden in _HIDDEN):
        yield "its unit denies the daemon access to homes, so it cannot run from one"
    for part in (place, *place.parents):
        found = part.stat()
        if found.st_uid != 0:
            yield f"{part} belongs to uid {found.st_uid}, which could change what root runs"
        if found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and found.st_gid != 0):
            yield f"users other than root may write to {part}, and could change what root runs"
        if not found.st_mode & stat.S_IXOTH or not place.stat().st_mode & stat.S_IROTH:
            yield f"users cannot access {part}, which their jobs need"


def write_file(target: Path, text: str, mode: int = 0o644) -> str:
    """Write a file atomically; return what was done, in one word.

    A file with this text that lacks permissions of `mode` is replaced, too.
    """
    there = target.exists()
    if there and target.read_text() == text and not mode & ~target.stat().st_mode:
        return "unchanged"
    target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.new")
    fresh.write_text(text)
    fresh.chmod(mode)
    fresh.replace(target)
    return "replaced" if there else "installed"


def _link(link: Path, target: Path) -> str:
    if link.is_symlink() and link.readlink() == target:
        return "unchanged"
    if link.exists() or link.is_symlink():
        return "not changed, since gpulease did not create it:"
    link.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    link.symlink_to(target)
    return "installed"


def _remove_file(path: Path, say: Say) -> None:
    if not path.exists() and not path.is_symlink():
        return
    path.unlink()
    say(f"removed {path}")
    for parent in path.parents if path.is_relative_to(_LIBRARIES) else ():
        if parent == _LIBRARIES:
            return
        _remove_if_empty(parent)


def _remove_directory(path: Path, say: Say) -> None:
    if path.is_dir():
        shutil.rmtree(path)
        say(f"removed {path}")


def _remove_if_empty(directory: Path) -> None:
    if directory.is_dir() and not any(directory.iterdir()):
        directory.rmdir()


def _call(*command: str, must: bool = True) -> str:
    # Root may inherit the PATH of another user from su(1) or sudo -E.
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=_ENVIRONMENT)
    if must and done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        raise SetupFailed(f"cannot continue: {' '.join(command)} failed: {said}")
    return done.stdout
