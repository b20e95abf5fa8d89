"""The program of ProbeProcess: a line of JSON for each command on stdin."""

import json
import sys
import threading
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from gpulease.domain.gpu import GpuUuid
from gpulease.errors import NoGpus
from gpulease.gpu.limits import DriverLimits
from gpulease.gpu.nvml import NvmlProbe
from gpulease.service.ports import NotLimited


def main() -> None:
    """Open a probe as the arguments say, and do as told until stdin ends."""
    deadline, start_timeout, first_retry = (
        timedelta(seconds=float(text)) for text in sys.argv[1:4]
    )
    try:
        probe = NvmlProbe.open(
            deadline,
            start_timeout=start_timeout,
            first_retry=first_retry,
            present=Path(sys.argv[4]),
        )
    except NoGpus as error:
        answer({"error": error.message, "hint": error.hint})
        return
    answer({"driver": probe.driver()})
    for command in sys.stdin:
        answer(obey(probe, command.strip()))
    probe.close()


def obey(probe: NvmlProbe, command: str) -> dict[str, Any]:
    """Return the answer to one command."""
    if command.startswith("during_read "):
        reading = threading.Thread(target=probe.read)
        reading.start()
        answered = obey(probe, command.removeprefix("during_read "))
        reading.join()
        return answered
    if command == "threads":
        return {"threads": threading.active_count()}
    if command.startswith(("limit ", "lift ", "obstacle ", "kept ")):
        return obey_about_limits(DriverLimits(probe), *command.split(" "))
    if command == "health":
        return {"heard": [asdict(heard) for heard in probe.health()]}
    begun_at = time.monotonic()
    readings = [asdict(reading) for reading in probe.read()]
    seconds = time.monotonic() - begun_at
    return {"readings": readings, "seconds": seconds, "driver": probe.driver()}


def obey_about_limits(
    limits: DriverLimits, verb: str, gpu: str, cgroup: str, memory: str = "0"
) -> dict[str, Any]:
    """Do as told about the driver's memory limits."""
    try:
        if verb == "obstacle":
            result: Any = limits.why_unavailable(GpuUuid(gpu), Path(cgroup))
        elif verb == "limit":
            result = limits.set_limit(GpuUuid(gpu), Path(cgroup), int(memory))
        elif verb == "kept":
            result = limits.current_limit(GpuUuid(gpu), Path(cgroup))
        else:
            result = limits.remove_limit(GpuUuid(gpu), Path(cgroup))
    except NotLimited as failure:
        result = str(failure)
    return {"result": result}


def answer(fields: dict[str, Any]) -> None:
    """Write one line."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
