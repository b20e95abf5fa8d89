"""A process of its own that reads GPUs through NvmlProbe: the driver library loads only once."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from gpulease.domain.gpu import Fault, GpuReading, GpuUuid, Link, ProcessReading
from gpulease.domain.health import GpuModes, HealthFigures, HealthReport

_MAIN = Path(__file__).with_name("probe_main.py")
_ROOT = Path(__file__).parents[2]
_PATIENCE = 20.0


class ProbeProcess:
    """Opens a probe in a child process; `error` is what it said if it could not."""

    def __init__(
        self,
        environment: Mapping[str, str],
        *,
        deadline: float = 3.0,
        start_timeout: float = 10.0,
        first_retry: float = 0.01,
        present: Path = Path("/nonexistent"),
    ) -> None:
        spans = (str(each) for each in (deadline, start_timeout, first_retry))
        self._process = subprocess.Popen(
            [sys.executable, str(_MAIN), *spans, str(present)],
            env={**os.environ, **environment, "PYTHONPATH": _python_path(environment)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        first = self._answer()
        self.error: str | None = first.get("error")
        self.hint: str | None = first.get("hint")
        self.driver: str | None = first.get("driver")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.close() == 0

    def read(self) -> tuple[GpuReading, ...]:
        """Read the GPUs once."""
        return self.timed_read()[0]

    def timed_read(self) -> tuple[tuple[GpuReading, ...], float]:
        """Read the GPUs once, and say how many seconds it took."""
        answer = self._ask("read")
        self.driver = answer["driver"]
        return tuple(_reading(fields) for fields in answer["readings"]), answer["seconds"]

    def read_until(self, good: Callable[[tuple[GpuReading, ...]], bool]) -> tuple[GpuReading, ...]:
        """Read until the GPUs are as they should be, and return that reading."""
        give_up_at = time.monotonic() + _PATIENCE
        while not good(readings := self.read()):
            assert time.monotonic() < give_up_at, readings
        return readings

    def health(self) -> list[HealthReport]:
        """Return what was heard of the GPUs' health since the last time."""
        return [_heard(fields) for fields in self._ask("health")["heard"]]

    def heard_until(self, good: Callable[[list[HealthReport]], bool]) -> list[HealthReport]:
        """Listen until all that was heard from now on is as it should be, and return it."""
        give_up_at, heard = time.monotonic() + _PATIENCE, list[HealthReport]()
        while not good(heard):
            assert time.monotonic() < give_up_at, heard
            heard += self.health()
        return heard

    def limits(self, verb: str, *arguments: object) -> Any:
        """Limit, lift, or ask for the obstacle; return what came of it, or why nothing did."""
        return self._ask(" ".join(map(str, (verb, *arguments))))["result"]

    def limits_during_read(self, verb: str, *arguments: object) -> Any:
        """Do as `limits` does while the GPUs are read."""
        return self._ask(" ".join(map(str, ("during_read", verb, *arguments))))["result"]

    def threads(self) -> int:
        """Return how many threads the process has."""
        return int(self._ask("threads")["threads"])

    def close(self) -> int:
        """Close the probe, end the process, and return its exit status."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        status = self._process.wait(timeout=_PATIENCE)
        if self._process.stdout is not None:
            self._process.stdout.close()
        return status

    def _ask(self, command: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


def _heard(fields: dict[str, Any]) -> HealthReport:
    figures, modes = fields.pop("figures"), fields.pop("modes")
    return HealthReport(
        GpuUuid(fields["gpu"]),
        tuple(fields["xids"]),
        figures and HealthFigures(**figures),
        fields["listens"],
        modes and GpuModes(**modes),
    )


def _reading(fields: dict[str, Any]) -> GpuReading:
    processes = fields.pop("processes")
    fields.pop("neighbours")  # of daemons, not of the driver
    fault, links = fields.pop("fault"), fields.pop("links")
    return GpuReading(
        **{**fields, "uuid": GpuUuid(fields["uuid"])},
        links=tuple(Link(**each) for each in links),
        fault=fault and Fault(fault),
        processes=None if processes is None else tuple(ProcessReading(**one) for one in processes),
    )


def _python_path(given: Mapping[str, str]) -> str:
    paths = [given.get("PYTHONPATH", ""), str(_ROOT), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(filter(None, paths))
