"""`gpuleased`: read the settings, run, and end with a sentence where it cannot.

The daemon's log as the journal wants it: a level before each line, see sd-daemon(3).
"""

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
from gpulease.daemon.recover import recover
from gpulease.daemon.serve import serve
from gpulease.daemon.systemd import Notifier
from gpulease.daemon.user_policy import unknown_names
from gpulease.errors import BadConfiguration, GpuleaseError, StateUnwritable
from gpulease.path_ownership import refuse_if_changeable
from gpulease.server.http_server import HttpProtocol
from gpulease.server.listener import MOST_CONNECTIONS
from gpulease.service.log_once import LogOnce

_PLAIN = "%(levelname)s %(name)s: %(message)s"
_IN_THE_JOURNAL = "%(name)s: %(message)s"
_ERROR = 3
_LEVELS = ((logging.CRITICAL, 2), (logging.ERROR, _ERROR), (logging.WARNING, 4), (logging.INFO, 6))
_DEBUG = 7


def goes_to_journal(environment: Mapping[str, str], fd: int = 2) -> bool:
    """Tell whether what is written to `fd` goes to the journal.

    The variable alone says little: it is inherited by who has long been redirected.
    """
    there = os.fstat(fd)
    return environment.get("JOURNAL_STREAM") == f"{there.st_dev}:{there.st_ino}"


def levelled(text: str, level: int = _ERROR) -> str:
    """Return `text` with a level of syslog(3) before each line; lines that are empty are left out.

    The journal makes an entry of each line, so a traceback keeps its level to the end.
    """
    return "\n".join(f"<{level}>{line}" for line in text.splitlines() if line.strip())


class JournalFormatter(logging.Formatter):
    """Writes the level as the journal reads it, so that `journalctl -p warning` finds it."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines of an entry."""
        level = next((syslog for at, syslog in _LEVELS if record.levelno >= at), _DEBUG)
        return levelled(super().format(record), level)


class WithoutFarewells(logging.Filter):
    """Drops what uvicorn says of the streams that end with the daemon: that is how they end."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether to log it."""
        error = record.exc_info[1] if record.exc_info else None
        is_farewell = isinstance(error, asyncio.CancelledError)
        return not (is_farewell or str(record.msg).startswith("Cancel %s running task"))


def set_up(*, journal: bool) -> None:
    """Send the log to stderr, from INFO on."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        JournalFormatter(_IN_THE_JOURNAL) if journal else logging.Formatter(_PLAIN)
    )
    logging.getLogger("uvicorn.error").addFilter(WithoutFarewells())
    logging.basicConfig(level=logging.INFO, handlers=[handler])


_log = logging.getLogger(__name__)

_PATIENCE_S, _PAUSE_S = 30.0, 5.0
"""More than the unit's StartLimitIntervalSec, divided by its StartLimitBurst."""

_SWITCH_AFTER_S = 0.0005
_EXAMPLES = """\
examples:
  gpuleased                       serve the GPUs of this machine, on the system's socket
  gpuleased --simulate 2x24G      serve two GPUs that are not there, to try gpulease out
  gpuleased --socket /tmp/g.sock --state /tmp/g --simulate 2x8G
                                  a second one beside the system's, for a test
  gpuleased recover               save what can be saved of a damaged database
"""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the daemon; exits 0 at its end, 78 if it cannot be run as it was told, 75 if not now."""
    journal = goes_to_journal(environment())
    set_up(journal=journal)
    # A watchdog kills with SIGABRT: then the log says where each thread was.
    faulthandler.enable()
    logging.getLogger("alembic").setLevel(logging.WARNING)
    # It warns of each request that is no HTTP, which anyone may send as often as they like.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    # The record holds the environments of jobs: nothing that is made here is for others to read,
    # but for what is opened to them by name.
    os.umask(0o077)
    _allow_many_descriptors()
    try:
        given = _parser().parse_args(arguments)
        settings = settings_of(given)
        if given.check:
            checked(settings)
            warnings = [f"warning: {each}\n" for each in unknown_names(settings)]
            sys.stdout.write("".join((*warnings, "the settings are in order\n")))
            sys.exit(0)
        if given.command == "recover":
            sys.stdout.write("\n".join(recover(settings)) + "\n")
            sys.exit(0)
        checked(settings)
        # What was imported lives as long as the process: no need to look at it again and again.
        gc.collect()
        gc.freeze()
        notifier = Notifier.of(environment(), os.getpid())
        # The loop is short of breath: a thread that computes gives way to it after this long.
        sys.setswitchinterval(_SWITCH_AFTER_S)
        _serve_in_the_end(
            notifier,
            lambda: asyncio.run(
                serve(
                    settings,
                    notifier,
                    lambda: checked(settings_of(given)),
                    confined=given.confined,
                )
            ),
        )
    except GpuleaseError as error:
        sys.stderr.write((levelled(error.text()) if journal else error.text()) + "\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)


def _serve_in_the_end(notifier: Notifier, serve_: Callable[[], None]) -> None:
    """Run the daemon; where a disk is full, say, try again for a while before it is given up.

    Only under a service manager, which would restart it some times within seconds and then never
    again: like this it goes on for ever.
    """
    until = time.monotonic() + (_PATIENCE_S if notifier.is_heard else 0.0)
    complaints = LogOnce(_log)
    while True:
        try:
            serve_()
        except StateUnwritable as error:
            if time.monotonic() >= until:
                raise
            complaints.say("start", f"{error.message}; trying again")
            notifier.waiting(f"{error.message}; trying again")
            time.sleep(_PAUSE_S)
        else:
            return


def _allow_many_descriptors() -> None:
    """Take as many descriptors as the hard limit allows: every waiting `run` holds a connection.

    Where they are few, one user gets a quarter of them and no more.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    HttpProtocol.counts.most = min(MOST_CONNECTIONS, max(hard // 4, 1))


def settings_of(given: argparse.Namespace) -> Settings:
    """Return the settings: defaults, then the file, then the environment, then the options."""
    if given.personal:
        base, usual = personal_settings(), personal_config()
    else:
        base, usual = Settings(), SYSTEM_CONFIG if SYSTEM_CONFIG.exists() else None
    file = given.config or usual
    if file is not None:
        refuse_if_changeable(file)
    unnamed = ("state",) if given.personal and given.config is None else ()
    settings = read_settings(file, base, unnamed=unnamed)
    if given.personal and given.config is None and settings.state != base.state:
        raise BadConfiguration(
            f"cannot use the configuration {file}: state is not for a daemon of your own",
            "set XDG_STATE_HOME, where every command looks for it",
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
        description="Lease the memory of this machine's GPUs to jobs, and launch them.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "command", nargs="?", choices=["recover"],
        help="make a sound record out of a damaged one; without it, serve",
    )  # fmt: skip
    parser.add_argument(
        "--simulate", metavar="GPUS",
        help="serve simulated GPUs, such as 2x24G or 1x80G,2x24G; "
        "a job's resident memory stands in for its GPU memory",
    )  # fmt: skip
    parser.add_argument("--socket", type=Path, metavar="PATH", help="where to listen")
    parser.add_argument("--state", type=Path, metavar="DIR", help="where to keep the record")
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings, in TOML")
    parser.add_argument(
        "--check",
        action="store_true",
        help="read the settings, say what is wrong with them (exit status 78), and leave",
    )
    parser.add_argument(
        "--confined",
        action="store_true",
        help="launch jobs in the mount namespace of process 1, whatever this daemon's own is",
    )
    parser.add_argument(
        "--personal", action="store_true",
        help="serve this user alone, from their own directories, and leave when idle",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"gpuleased {described()}")
    return parser
