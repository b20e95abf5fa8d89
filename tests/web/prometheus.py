"""A real Prometheus on loopback that scrapes a gpulease-web, asked through its HTTP API."""

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daemon_rig import PATIENCE_S, free_port, wait_for

PROGRAM = shutil.which("prometheus")
SCRAPES_EVERY_S = 0.25

_CONFIG = """\
global: {{scrape_interval: {every}ms, scrape_timeout: {every}ms, evaluation_interval: {every}ms}}
rule_files: ["{rules}"]
scrape_configs:
  - job_name: gpulease
    static_configs: [{{targets: ["{target}"]}}]
"""


@dataclass(frozen=True)
class Prometheus:
    """A Prometheus that runs."""

    url: str
    began_at: float

    def api(self, path: str, **query: str) -> Any:
        """Return the data of an answer; fail with what Prometheus says if it refuses."""
        target = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(target, timeout=PATIENCE_S) as reply:
                return json.load(reply)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{query}: {error.read().decode()}") from error

    def value(self, expression: str) -> float | None:
        """Return the present value of an expression with one series; None if it has none."""
        found = self.api("query", query=expression)["result"]
        assert len(found) <= 1, found
        return float(found[0]["value"][1]) if found else None

    def series(self, expression: str) -> list[Mapping[str, Any]]:
        """Return the values since the start, at each scrape."""
        # The last step is at most the end.
        end, step = str(time.time() + SCRAPES_EVERY_S), str(SCRAPES_EVERY_S)
        found: list[Mapping[str, Any]] = self.api(
            "query_range", query=expression, start=str(self.began_at), end=end, step=step
        )["result"]
        return found

    def course(self, expression: str) -> list[float]:
        """Return the values of one series since the start, without repetitions."""
        (found,) = self.series(expression)
        values = [float(value) for _, value in found["values"]]
        return [
            value for value, before in zip(values, [None, *values], strict=False) if value != before
        ]

    def wait_for(self, expression: str, value: float) -> None:
        """Wait until an expression has a value."""
        try:
            wait_for(expression, lambda: self.value(expression) == value)
        except AssertionError:
            raise AssertionError(f"{expression} is {self.value(expression)}, not {value}") from None


@contextmanager
def prometheus(folder: Path, target: str, rules: Path) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes `target`, HOST:PORT."""
    assert PROGRAM is not None
    address = f"127.0.0.1:{free_port()}"
    config, log = folder / "prometheus.yml", folder / "prometheus.log"
    every = round(SCRAPES_EVERY_S * 1000)
    config.write_text(_CONFIG.format(every=every, target=target, rules=rules))
    with log.open("wb") as said:
        process = subprocess.Popen(
            [PROGRAM, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
             f"--web.listen-address={address}"],
            stdout=said, stderr=said, stdin=subprocess.DEVNULL, cwd=folder,
        )  # fmt: skip
    made = Prometheus(f"http://{address}", time.time())

    def is_ready() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(f"{made.url}/-/ready", timeout=PATIENCE_S) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    try:
        wait_for("Prometheus is ready", is_ready)
        yield made
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
