"""Runs gpuleased with passes over the queue that fail while a file exists; all else is real."""

import os
from pathlib import Path

from gpulease.daemon import main
from gpulease.domain.plan import Plan, plan
from gpulease.domain.snapshot import Snapshot


def plan_or_fail(snapshot: Snapshot) -> Plan:
    if Path(os.environ["PASSES_FAIL"]).exists():
        raise RecursionError("a bug")
    return plan(snapshot)


if __name__ == "__main__":
    from gpulease.service import scheduler

    scheduler.plan = plan_or_fail  # type: ignore[attr-defined]
    main.main()
