"""`gpulease-setup`: puts the units of this environment in their places, and takes all of it away.

What is put where is the table `FILES`; everything else that removing has to know is below it.

Device rules for what users start outside of jobs: the drop-ins, and their text.

A job's scope denies it the GPUs of others. A user can start a process elsewhere from within a job:
in their own systemd instance, in a login session, by cron or at. These rules deny GPUs there.
"""

import grp
import os
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
from gpulease.errors import GpuleaseError, SetupFailed
from gpulease.host.state_dir import JOBS
from gpulease.path_ownership import refuse_if_changeable
from gpulease.shim.record import is_alive
from gpulease.store.store import census
from gpulease.user_daemon import LOCK, SERVING

NAME = "50-gpulease.conf"
_RESTRICTED = {
    # Of every user: their sessions, and their own systemd instance.
    "user-.slice": "Slice",
    # These start programs of users within their own unit. Some distributions say crond.
    "cron.service": "Service",
    "crond.service": "Service",
    "atd.service": "Service",
}
_ROOT = "user-0.slice"
_EXCEPTED = "# Root may open every device. This file replaces the one for all users.\n"


def drop_ins(units: Path, template: str) -> Mapping[Path, str]:
    """Return the text of each drop-in by its path below `units`."""
    rules = {
        units / f"{unit}.d" / NAME: template.replace("[SECTION]", f"[{section}]")
        for unit, section in _RESTRICTED.items()
    }
    return {**rules, units / f"{_ROOT}.d" / NAME: _EXCEPTED}


_INSTALLED = Path(__file__).parent / "systemd"
_IN_A_CHECKOUT = Path(__file__).parents[2] / "systemd"
SOURCES = _INSTALLED if _INSTALLED.is_dir() else _IN_A_CHECKOUT

_LIBRARIES = Path("/usr/local/lib")
UNITS = _LIBRARIES / "systemd/system"
"""For what is installed by hand; what the admin changes goes to /etc, and wins over it."""
FILES = {
    "gpuleased.service": UNITS / "gpuleased.service",
    "gpulease.slice": UNITS / "gpulease.slice",
    "gpulease.sysusers": Path("/usr/local/lib/sysusers.d/gpulease.conf"),
    "gpulease.tmpfiles": Path("/usr/local/lib/tmpfiles.d/gpulease.conf"),
}
SERVICE = "gpuleased.service"
GROUP = "gpulease"
COMMAND = Path("/usr/local/bin/gpulease")
_WRITTEN_PLACE = "/opt/gpulease/bin/"
"""Where the files say that the programs are."""
_DROP_INS = tuple(Path("/etc/systemd/system") / f"{unit}.d" for unit in (SERVICE, "gpulease.slice"))
_HIDDEN = tuple(map(Path, ("/home", "/root", "/run/user")))
"""What ProtectHome=yes hides from the daemon."""
_SYSTEMD = Path("/run/systemd/system")
_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
"""Of the system's programs that are called."""

Say = Callable[[str], None]
Confirm = Callable[[str], bool]
"""Shows what is to be deleted, and returns whether it may be."""


def install(say: Say, *, now: bool, restrict_users: bool | None = None) -> None:
    """Install the units, or those of a newer version over them; `now` starts the daemon with them.

    `restrict_users` denies users the GPUs outside of jobs, or no longer; None: as it was.

    Raises:
        SetupFailed: this machine or this environment is not fit for it; nothing was changed.
    """
    _check_machine()
    programs = Path(sys.prefix) / "bin"
    _check_environment(programs)
    for source, target in FILES.items():
        text = (SOURCES / source).read_text().replace(_WRITTEN_PLACE, f"{programs}/")
        say(f"{_write(target, text)} {target}")
    say(f"{_link(COMMAND, programs / 'gpulease')} {COMMAND}")
    _restrict_users(say, restrict_users)
    _call("systemd-sysusers", str(FILES["gpulease.sysusers"]))
    _call("systemd-tmpfiles", "--create", str(FILES["gpulease.tmpfiles"]))
    _call("systemctl", "daemon-reload")
    if now:
        _call("systemctl", "enable", SERVICE)
        # A restart and no start: after an upgrade the old one still runs. Jobs go on.
        _call("systemctl", "restart", SERVICE)
        say(f"{SERVICE} runs; systemctl status {SERVICE} shows how it is")
    else:
        say(f"next: systemctl enable --now {SERVICE} (after an upgrade: systemctl restart)")


def _restrict_users(say: Say, wanted: bool | None) -> None:
    files = _user_rules()
    were_there = any(file.exists() for file in files)
    if wanted or (wanted is None and were_there):
        for target, text in files.items():
            say(f"{_write(target, text)} {target}")
    if wanted is False:
        for target in files:
            _remove_file(target, say)
    if wanted and not were_there:
        say("users except root can open GPUs in jobs of gpulease alone, from now on")
    if wanted is False and were_there:
        say("a user can open every GPU again once all of their sessions have ended")


def _user_rules() -> Mapping[Path, str]:
    return drop_ins(UNITS, (SOURCES / "gpulease-users.conf").read_text())


def remove(say: Say, confirm: Confirm, *, purge: bool, force: bool) -> None:
    """Stop the daemon and take away what `install` put there; `purge` takes the rest as well.

    Raises:
        SetupFailed: jobs are running, and it is not forced, or the purge was not confirmed;
            nothing was changed.
    """
    if os.geteuid() != 0:
        raise SetupFailed("cannot remove gpulease: only root can", "try: sudo gpulease-setup ...")
    settings = _settings()
    running = _running_jobs(settings.state)
    if running and not force:
        raise SetupFailed(
            f"cannot remove gpulease: {_jobs(running)} running",
            "gpulease cancel ends them; with --force they go on, and nobody watches them any more",
        )
    if purge and not confirm(purge_notice(settings.state)):
        raise SetupFailed("cannot purge: it was not confirmed; nothing was changed")
    _remove_units(say)
    # From here on the users may have daemons of their own.
    _remove_directory(SYSTEM_SOCKET.parent, say)
    if purge:
        _purge(settings, say)
    else:
        say(f"kept: {settings.state}, {SYSTEM_CONFIG.parent}, the group {GROUP}; see --purge")
    say(f"the programs themselves are in {sys.prefix}; remove that directory at last")


def _remove_units(say: Say) -> None:
    if _SYSTEMD.exists() and FILES[SERVICE].exists():
        _call("systemctl", "disable", "--now", SERVICE)
    for target in (*FILES.values(), *_user_rules()):
        _remove_file(target, say)
    if COMMAND.is_symlink() and COMMAND.readlink() == Path(sys.prefix) / "bin" / "gpulease":
        _remove_file(COMMAND, say)
    if _SYSTEMD.exists():
        _call("systemctl", "daemon-reload")
        _call("systemctl", "reset-failed", SERVICE, must=False)


def purge_notice(state: Path) -> str:
    """Return what a purge deletes, in words."""
    found = census(state / DATABASE_NAME)
    if found is None:
        jobs = "all jobs on record, how many is not known because the record cannot be read"
    else:
        jobs = ", ".join(
            (
                _number(found.waiting, "waiting job"),
                _number(found.holds, "hold"),
                _number(found.running, "running job"),
                _number(found.ended, "ended job"),
            )
        )
    return (
        f"this deletes the record in {state}: {jobs}, with their output;\n"
        f"and the settings in {SYSTEM_CONFIG.parent}, the drop-ins of the units and the group "
        f"{GROUP}. Waiting jobs do not run.\n"
    )


def _number(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


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
    """Remove all that a daemon keeps in its state directory, which may hold others' things too."""
    _remove_directory(state / JOBS, say)
    for file in (*state.glob(f"{DATABASE_NAME}*"), state / LOCK, *state.glob(f"{SERVING}*")):
        _remove_file(file, say)
    _remove_if_empty(state)


def _settings() -> Settings:
    """Return the settings of the daemon; those that cannot be read must not keep it installed."""
    try:
        if SYSTEM_CONFIG.exists():
            refuse_if_changeable(SYSTEM_CONFIG)
        return read_settings(SYSTEM_CONFIG if SYSTEM_CONFIG.exists() else None, Settings())
    except GpuleaseError:
        return Settings(state=SYSTEM_STATE)


def _running_jobs(state: Path) -> list[int]:
    jobs = state / JOBS
    if not jobs.is_dir():
        return []
    return sorted(int(job.name) for job in jobs.iterdir() if job.name.isdecimal() and is_alive(job))


def _jobs(running: list[int]) -> str:
    if len(running) == 1:
        return f"job {running[0]} is"
    shown = ", ".join(map(str, running[:10])) + (", ..." if len(running) > 10 else "")
    return f"the jobs {shown} are"


def _check_machine() -> None:
    if os.geteuid() != 0:
        raise SetupFailed("cannot install: only root can", "try: sudo gpulease-setup install")
    if not _SYSTEMD.exists():
        raise SetupFailed(
            "cannot install: this machine was not booted with systemd",
            "run gpuleased as root under what starts services here; docs/admin.md says how",
        )


def _check_environment(programs: Path) -> None:
    """Check that root may run what is here: nobody else may change it, and everybody read it."""
    if not (programs / "gpuleased").exists():
        raise SetupFailed(
            f"cannot install: there is no {programs}/gpuleased",
            "python3 -m venv /opt/gpulease, and install gpulease with the pip of that",
        )
    # The python that a venv links to need not lie in what it calls its base.
    python = Path(sys.executable).resolve().parent
    places = {Path(sys.prefix), Path(sys.base_prefix), python, Path(gpulease.__file__).parent}
    for place in sorted(place.resolve() for place in places):
        for wrong in _wrong(place):
            raise SetupFailed(
                f"cannot install from {place}: {wrong}",
                "python3 -m venv /opt/gpulease as root, with the system's python3, and install "
                "gpulease there",
            )


def _wrong(place: Path) -> Iterator[str]:
    if any(place.is_relative_to(hidden) for hidden in _HIDDEN):
        yield "the daemon is kept out of homes, so it cannot be run from one"
    for part in (place, *place.parents):
        found = part.stat()
        if found.st_uid != 0:
            yield f"{part} belongs to uid {found.st_uid}, who could change what root runs"
        if found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and found.st_gid != 0):
            yield f"others than root may write to {part}, and so change what root runs"
        if not found.st_mode & stat.S_IXOTH or not place.stat().st_mode & stat.S_IROTH:
            yield f"{part} is closed to users, whose jobs need what is in it"


def _write(target: Path, text: str) -> str:
    """Write a file whole or not at all; return what was done, in a word."""
    if target.exists() and target.read_text() == text:
        return "unchanged"
    there = target.exists()
    target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.new")
    fresh.write_text(text)
    fresh.chmod(0o644)
    fresh.replace(target)
    return "replaced" if there else "installed"


def _link(link: Path, target: Path) -> str:
    if link.is_symlink() and link.readlink() == target:
        return "unchanged"
    if link.exists() or link.is_symlink():
        return "left as it is, since it is not ours:"
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


def _call(*command: str, must: bool = True) -> None:
    # Root's own PATH may have come from another user, through su(1) or sudo -E.
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=_ENVIRONMENT)
    if must and done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        raise SetupFailed(f"cannot go on: {' '.join(command)} failed: {said}")
