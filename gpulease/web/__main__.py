"""The entry point of `gpulease-web`, and of `python -m gpulease.web`."""

import sys
from importlib.util import find_spec
from typing import NoReturn

from gpulease.daemon_packages import install_hint, prefer_installed, too_old
from gpulease.errors import BadConfiguration

NEEDED = ("jinja2", "prometheus_client", "starlette", "uvicorn")
"""Names to import, of the distributions in the extra `web`."""


def main() -> NoReturn:
    """Serve the web page, or exit with a hint if its packages are not installed."""
    prefer_installed()
    missing = [name for name in NEEDED if find_spec(name) is None]
    purpose = "start gpulease-web"
    if missing or too_old(purpose):
        absent = f"cannot {purpose}: its packages are not installed: {', '.join(missing)}"
        error = BadConfiguration(too_old(purpose) or absent, install_hint("web"))
        sys.stderr.write(error.text() + "\n")
        sys.exit(error.exit_code)
    from gpulease.web.main import main as run

    run()


if __name__ == "__main__":
    main()
