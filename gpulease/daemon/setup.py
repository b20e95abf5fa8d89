"""The command `gpulease-setup`: reads its arguments, and ends with a sentence where it cannot."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from gpulease.daemon.install import install, remove
from gpulease.errors import GpuleaseError

_EXAMPLES = """\
examples:
  gpulease-setup install --now    install the units of this environment, and start the daemon
  gpulease-setup remove           take them away; what the daemon has recorded is kept
  gpulease-setup remove --purge   and the record, the configuration and the group with them
"""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Install or remove gpulease's units, as root."""
    # What is installed is for everyone to read, whatever root's umask is.
    os.umask(0o022)
    given = _parser().parse_args(arguments)
    try:
        if given.verb == "install":
            install(_say, now=given.now)
        else:
            remove(_say, purge=given.purge, force=given.force)
    except GpuleaseError as error:
        sys.stderr.write(error.text() + "\n")
        sys.exit(error.exit_code)
    sys.exit(0)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpulease-setup",
        description="Install gpulease's systemd units for the whole machine, or remove them.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    installing = verbs.add_parser("install", help="install the units, or upgrade them")
    installing.add_argument("--now", action="store_true", help="enable and (re)start the daemon")
    removing = verbs.add_parser("remove", help="stop the daemon and remove the units")
    removing.add_argument(
        "--purge", action="store_true", help="remove record, configuration and group as well"
    )
    removing.add_argument("--force", action="store_true", help="even though jobs are running")
    return parser


if __name__ == "__main__":
    main()
