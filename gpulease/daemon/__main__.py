"""The entry point of `gpuleased`, and of `python -m gpulease.daemon`."""

import sys
from typing import NoReturn

from gpulease.daemon_packages import INSTALL_HINT, complaint, prefer_installed
from gpulease.errors import BadConfiguration


def main() -> NoReturn:
    """Run the daemon, or exit with a hint if its packages are not installed."""
    prefer_installed()
    if (message := complaint("start gpuleased")) is not None:
        error = BadConfiguration(message, INSTALL_HINT)
        sys.stderr.write(error.text() + "\n")
        sys.exit(error.exit_code)
    from gpulease.daemon.main import main as run

    run()


if __name__ == "__main__":
    main()
