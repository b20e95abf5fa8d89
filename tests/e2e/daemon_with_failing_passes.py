"""Runs gpuleased with passes over the queue that fail while a file exists; all else is real.

Each pass that fails adds a byte to the file.
"""

import os
from pathlib import Path

from gpulease.daemon import main
from gpulease.domain.plan import Plan, plan
from gpulease.domain.snapshot import Snapshot


def plan_or_fail(snapshot: Snapshot) -> Plan:
    if (fail := Path(os.environ["PASSES_FAIL"])).exists():
        with fail.open("a") as file:
            file.write(".")
        raise RecursionError("a bug")
    return plan(snapshot)


if __name__ == "__main__":
    from gpulease.service import scheduler

    scheduler.plan = plan_or_fail  # type: ignore[attr-defined]
    main.main()
