"""The command `gpuleased`: reads arguments and settings, sets up the log, and runs the daemon."""

import argparse
import asyncio
import faulthandler
import gc
import logging
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from gpulease.build import described
from gpulease.config import (
    SYSTEM_CONFIG,
    Settings,
    environment,
    personal_config,
    personal_settings,
    read_settings,
)
from gpulease.daemon.app import checked
from gpulease.daemon.serve import serve
from gpulease.daemon.systemd import Notifier
from gpulease.daemon.user_policy import without_effect
from gpulease.errors import BadConfiguration, GpuleaseError, StateUnwritable
from gpulease.path_ownership import refuse_if_changeable
from gpulease.server.http_server import HttpProtocol
from gpulease.server.listener import MOST_CONNECTIONS
from gpulease.service.log_once import LogOnce

_PLAIN = "%(levelname)s %(name)s: %(message)s"
_JOURNAL = "%(name)s: %(message)s"
_ERROR = 3
_LEVELS = ((logging.CRITICAL, 2), (logging.ERROR, _ERROR), (logging.WARNING, 4), (logging.INFO, 6))
_DEBUG = 7


def goes_to_journal(environment: Mapping[str, str], fd: int = 2) -> bool:
    """Return whether output to `fd` goes to the journal.

    A process inherits the variable even after its output was redirected, so compare the file.
    """
    there = os.fstat(fd)
    return environment.get("JOURNAL_STREAM") == f"{there.st_dev}:{there.st_ino}"


def levelled(text: str, level: int = _ERROR) -> str:
    """Return `text` with a syslog(3) level before each line, without empty lines; see sd-daemon(3).

    The journal makes an entry of each line, so each line of a traceback needs the level.
    """
    return "\n".join(f"<{level}>{line}" for line in text.splitlines() if line.strip())


class JournalFormatter(logging.Formatter):
    """Writes levels in the form of the journal, so that `journalctl -p warning` works."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines of an entry."""
        level = next((syslog for at, syslog in _LEVELS if record.levelno >= at), _DEBUG)
        return levelled(super().format(record), level)


class WithoutCancelledStreams(logging.Filter):
    """Drops uvicorn's messages about streams that the end of the daemon cancels, as it should."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log it."""
        error = record.exc_info[1] if record.exc_info else None
        was_cancelled = isinstance(error, asyncio.CancelledError)
        return not (was_cancelled or str(record.msg).startswith("Cancel %s running task"))


def set_up_log(*, journal: bool) -> None:
    """Send the log to stderr, from INFO on."""
    # The watchdog of systemd kills with SIGABRT. The log then shows where each thread was.
    faulthandler.enable()
    logging.getLogger("alembic").setLevel(logging.WARNING)
    # It warns of each request that is not HTTP, and any user may send many of them.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    handler = logging.StreamHandler()
    handler.setFormatter(JournalFormatter(_JOURNAL) if journal else logging.Formatter(_PLAIN))
    logging.getLogger("uvicorn.error").addFilter(WithoutCancelledStreams())
    logging.basicConfig(level=logging.INFO, handlers=[handler])


_log = logging.getLogger(__name__)

_TRY_FOR_S, _PAUSE_S = 30.0, 5.0
"""The first is more than the unit's StartLimitIntervalSec divided by its StartLimitBurst."""

_SWITCH_AFTER_S = 0.0005
_EXAMPLES = """\
examples:
  gpuleased                       lease the GPUs of this machine, on the system's socket
  gpuleased --simulate 2x24G      lease two simulated GPUs, to try gpulease
  gpuleased --socket /tmp/g.sock --state /tmp/g --simulate 2x8G
                                  run a second daemon next to the system's, for a test
  gpuleased recover               restore a damaged database
"""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the daemon; exit with 0 at its end, 78 with invalid settings, 75 to be restarted."""
    journal = goes_to_journal(environment())
    set_up_log(journal=journal)
    # The database contains environments of jobs. Files are private unless a mode is set.
    os.umask(0o077)
    _allow_many_descriptors()
    try:
        given = _parser().parse_args(arguments)
        settings = settings_of(given)
        if given.check:
            checked(settings)
            warnings = [f"warning: {each}" for each in without_effect(settings)]
            sys.stdout.write("\n".join((*warnings, "the settings are valid", "")))
        elif given.command == "recover":
            from gpulease.daemon.recover import recover  # which a daemon that runs does not need

            sys.stdout.write("\n".join((*recover(settings), "")))
        else:
            _serve(given, checked(settings))
    except GpuleaseError as error:
        sys.stderr.write((levelled(error.text()) if journal else error.text()) + "\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)


def _serve(given: argparse.Namespace, settings: Settings) -> None:
    # Imported modules live as long as the process, so the garbage collector can skip them.
    gc.collect()
    gc.freeze()
    # Let the event loop run soon while another thread computes.
    sys.setswitchinterval(_SWITCH_AFTER_S)
    notifier = Notifier.of(environment(), os.getpid())

    def read_again() -> Settings:
        return checked(settings_of(given))

    _serve_with_retries(
        notifier,
        lambda: asyncio.run(serve(settings, notifier, read_again, confined=given.confined)),
    )


def _serve_with_retries(notifier: Notifier, serve_: Callable[[], None]) -> None:
    """Run the daemon; if it cannot start now (a full disk, say), try again for a while.

    Only under a service manager, which stops restarting a service that fails often within its start
    limit. With these pauses the restarts stay below that limit.
    """
    until = time.monotonic() + (_TRY_FOR_S if notifier.is_heard else 0.0)
    failures = LogOnce(_log)
    while True:
        try:
            serve_()
        except StateUnwritable as error:
            if time.monotonic() >= until:
                raise
            failures.say("start", f"{error.message}; trying again")
            notifier.waiting(f"{error.message}; trying again")
            time.sleep(_PAUSE_S)
        else:
            return


def _allow_many_descriptors() -> None:
    """Raise the limit of file descriptors to the hard limit: each waiting `run` needs one.

    If that is low, one user may have at most a quarter of them as connections.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    HttpProtocol.counts.most = min(MOST_CONNECTIONS, max(hard // 4, 1))


def settings_of(given: argparse.Namespace) -> Settings:
    """Return the settings: defaults, changed by the file, the environment, and then the options."""
    if given.personal:
        base, usual = personal_settings(), personal_config()
    else:
        base, usual = Settings(), SYSTEM_CONFIG if SYSTEM_CONFIG.exists() else None
    file = given.config or usual
    if file is not None:
        refuse_if_changeable(file)
    unnamed = ("state",) if given.personal and given.config is None else ()
    settings = read_settings(file, base, unnamed=unnamed, is_users=given.personal)
    if given.personal and given.config is None and settings.state != base.state:
        raise BadConfiguration(
            f"cannot use the configuration {file}: state cannot be set for a personal daemon",
            "set XDG_STATE_HOME instead, which all commands use",
        )
    options = {
        name: getattr(given, name)
        for name in ("socket", "state", "simulate")
        if getattr(given, name) is not None
    }
    settings = replace(settings, **options)
    return replace(settings, socket=settings.socket.absolute(), state=settings.state.absolute())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpuleased",
        description="Lease the memory of this machine's GPUs to jobs, and launch the jobs.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "command", nargs="?", choices=["recover"],
        help="restore a damaged database and exit; without it, run the daemon",
    )  # fmt: skip
    parser.add_argument(
        "--simulate", metavar="GPUS",
        help="simulate GPUs, such as 2x24G or 1x80G:A100,2x24G; the resident memory of a "
        "job counts as its GPU memory",
    )  # fmt: skip
    parser.add_argument("--socket", type=Path, metavar="PATH", help="listen on this Unix socket")
    parser.add_argument(
        "--state", type=Path, metavar="DIR", help="directory of the database and of job output"
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings file, in TOML")
    parser.add_argument(
        "--check",
        action="store_true",
        help="check the settings and exit, with status 78 if they have mistakes",
    )
    parser.add_argument(
        "--confined",
        action="store_true",
        help="launch jobs in the mount namespace of process 1 instead of the daemon's",
    )
    parser.add_argument(
        "--personal", action="store_true",
        help="serve the current user only, from directories of that user, and exit when idle",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"gpuleased {described()}")
    return parser
