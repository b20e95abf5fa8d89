"""Run the daemon as `python -m gpulease.daemon`."""

from gpulease.daemon.main import main

if __name__ == "__main__":
    main()
