"""Run the command as `python -m gpulease.cli`."""

from gpulease.cli.app import main

if __name__ == "__main__":
    main()
