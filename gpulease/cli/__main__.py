#!/usr/bin/env python3
"""Run the command: as `gpulease`, which is a copy of this file, and as `python -m gpulease.cli`."""

import os
import sys

if __name__ == "__main__":
    # The same as gpulease.daemon_packages.prefer_installed: a directory `gpulease` on the user's
    # PYTHONPATH would hide that. Installers drop options such as -I from the first line.
    library = os.__file__.rpartition("/")[0]
    if library in sys.path:
        start = sys.path.index(library)
        sys.path = sys.path[start:] + sys.path[:start]

    if sys.version_info < (3, 11):
        from gpulease.daemon_packages import install_hint, too_old

        sys.exit(f"{too_old('run gpulease')}\n\nhint: {install_hint()}")
    from gpulease.cli.app import main

    main()
