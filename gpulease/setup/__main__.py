"""The entry point of `gpulease-setup`."""

import sys
from typing import NoReturn

from gpulease.daemon_packages import INSTALL_HINT, complaint, prefer_installed
from gpulease.errors import SetupFailed


def main() -> NoReturn:
    """Install or remove the units, or exit with a hint if the daemon's packages are missing."""
    prefer_installed()
    if (message := complaint("set up the daemon")) is not None:
        error = SetupFailed(message, INSTALL_HINT)
        sys.stderr.write(error.text() + "\n")
        sys.exit(error.exit_code)
    from gpulease.setup.command import main as run

    run()


if __name__ == "__main__":
    main()
