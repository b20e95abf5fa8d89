"""`gpulease-setup`: parses its arguments, and installs or removes gpulease."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from gpulease.build import described
from gpulease.daemon_packages import INSTALL_HINT, complaint, prefer_installed
from gpulease.errors import GpuleaseError, SetupFailed

_EXAMPLES = """\
examples:
  gpulease-setup install --now    install the units of this environment, and start the daemon
  gpulease-setup install --restrict-users
                                  let users open GPUs only in jobs (docs/enforcement.md)
  gpulease-setup install --web --now
                                  also serve the web page on 127.0.0.1:8080 (docs/admin/install.md)
  gpulease-setup remove           remove the units; keep the data of the daemon
  gpulease-setup remove --purge   also remove the data, the configuration and the group
  gpulease-setup slurm            print the lines of this node for Slurm (docs/cluster.md)
  gpulease-setup slurm --install  install the prolog, epilog and task prolog in /etc/slurm
  gpulease-setup slurm --check    compare Slurm's configuration with this node
"""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Install or remove gpulease's units as root, or set up this node for Slurm."""
    prefer_installed()
    try:
        if (missing := complaint("set up the daemon")) is not None:
            raise SetupFailed(missing, INSTALL_HINT)
        code = _run(arguments)
    except GpuleaseError as error:
        sys.stderr.write(error.text() + "\n")
        sys.exit(error.exit_code)
    sys.exit(code)


def _run(arguments: Sequence[str] | None) -> int:
    # These import the packages of the daemon.
    from gpulease.setup.install import install, remove
    from gpulease.slurm.setup.verb import slurm

    # All users must be able to read the installed files, independent of root's umask.
    os.umask(0o022)
    given = _parser().parse_args(arguments)
    if given.verb == "slurm":
        return slurm(_say, install=given.install, check=given.check)
    if given.verb == "install":
        install(
            _say, now=given.now, restrict_users=given.restrict_users, web=given.web,
            is_package=given.package,
        )  # fmt: skip
    else:

        def confirm(notice: str) -> bool:
            if given.yes:
                _say(notice.strip())
            return given.yes or _ask(notice)

        remove(_say, confirm, purge=given.purge, force=given.force, is_package=given.package)
    return 0


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


def _ask(notice: str) -> bool:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise SetupFailed(
            f"cannot purge: it needs a confirmation, and this is not a terminal: {notice.strip()}",
            "to delete all of it without a question: gpulease-setup remove --purge --yes",
        )
    sys.stdout.write(f"{notice}Delete it? [y/N] ")
    sys.stdout.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpulease-setup",
        description="Install gpulease's systemd units for the whole machine, or remove them. "
        "Set up a node for Slurm.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"gpulease-setup {described()}")
    parser.add_argument(
        "--package", action="store_true",
        help="leave units, programs and links alone: they belong to a package of the system, "
        "which sets this",
    )  # fmt: skip
    verbs = parser.add_subparsers(dest="verb", required=True)
    installing = verbs.add_parser("install", help="install or upgrade the units")
    installing.add_argument("--now", action="store_true", help="enable and (re)start the services")
    installing.add_argument(
        "--restrict-users", action=argparse.BooleanOptionalAction,
        help="deny users the GPUs outside of jobs, by device rules for sessions, cron and at. "
        "There, nvidia-smi, `gpulease hold` and desktops on a GPU stop working. "
        "Without this option, nothing changes",
    )  # fmt: skip
    installing.add_argument(
        "--web", action=argparse.BooleanOptionalAction,
        help="install gpulease-web, a read-only web page with metrics for Prometheus, or remove "
        "it. Without this option, nothing changes",
    )  # fmt: skip
    removing = verbs.add_parser("remove", help="stop the daemon and remove the units")
    removing.add_argument(
        "--purge", action="store_true",
        help="also remove the data, the configuration and the group, after a question that shows "
        "the number of jobs",
    )  # fmt: skip
    removing.add_argument("--yes", action="store_true", help="purge without asking")
    removing.add_argument("--force", action="store_true", help="remove even while jobs are running")
    clustering = verbs.add_parser("slurm", help="set up this node for Slurm (docs/cluster.md)")
    clustering.add_argument(
        "--install", nargs="*", type=Path, metavar="DIRECTORY",
        help="install the hook, which is prolog, epilog and task prolog, in these directories "
        "(default: /etc/slurm)",
    )  # fmt: skip
    clustering.add_argument(
        "--check", action="store_true",
        help="compare Slurm's configuration with this node; exits with 1 if a check fails",
    )  # fmt: skip
    return parser


if __name__ == "__main__":
    main()
