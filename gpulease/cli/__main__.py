#!/usr/bin/env python3
"""Run the command: as `gpulease`, which is a copy of this file, and as `python -m gpulease.cli`."""

from gpulease.cli.app import main

if __name__ == "__main__":
    main()
