"""What a real Prometheus records: jobs from the queue to their end, GPUs, the daemon."""

import json
import math
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from daemon_rig import Daemon, open_folder
from nvml_stand_in import Card, StandIn

from .prometheus import PROGRAM, Prometheus, prometheus
from .rig import web

pytestmark = [
    pytest.mark.skipif(
        PROGRAM is None, reason="Prometheus is not installed: apt install prometheus"
    ),
]
G = 1024**3
DOCS = Path(__file__).parents[2] / "docs"


@dataclass
class World:
    """A daemon on two GPUs, its web server, and a Prometheus that scrapes that."""

    daemon: Daemon
    driver: StandIn
    prometheus: Prometheus

    def submit(self, memory: str, command: str) -> int:
        return self.daemon.submit("--mem", memory, "--", "sh", "-c", command)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with open_folder() as folder:
        cards = [
            Card(total=8 * G, power=120.0, power_limit=300.0),
            Card(total=4 * G, temperature=51),
        ]
        driver = StandIn(folder, gpus=cards)
        daemon = Daemon(
            folder, simulate=None, environment=driver.environment(),
            settings={"grace": "1s", "overuse": "warn"},
        )  # fmt: skip
        daemon.start()
        try:
            rules = DOCS / "prometheus/alerts.yml"
            with (
                web(daemon.socket) as served,
                prometheus(folder, f"{served.host}:{served.port}", rules) as recording,
            ):
                recording.wait_for("gpulease_daemon_up", 1)
                yield World(daemon, driver, recording)
        finally:
            daemon.end_all()


@pytest.fixture(scope="module")
def story(world: World) -> World:
    """Return a world in which something of each kind has happened, and was recorded."""
    jobs, recorded = [], world.prometheus
    jobs.append(world.submit("8G", "sleep 600"))
    world.daemon.wait_until(jobs[0], "active")
    jobs.append(world.submit("6G", "sleep 600"))
    recorded.wait_for('gpulease_jobs{state="active"}', 1)
    recorded.wait_for('gpulease_jobs{state="queued"}', 1)
    recorded.wait_for("sum(gpulease_gpu_memory_leased_bytes)", 8 * G)
    world.daemon.cancel(jobs[0])
    recorded.wait_for('gpulease_jobs_ended_total{outcome="cancelled"}', 1)
    recorded.wait_for("sum(gpulease_gpu_memory_leased_bytes)", 6 * G)
    pid = world.daemon.wait_until(jobs[1], "active")["pid"]
    world.driver.change(0, used=8 * G, processes=[(pid, 7 * G), (1, G)], utilization=87)
    recorded.wait_for("gpulease_leases_over_limit", 1)
    recorded.wait_for('gpulease_gpu_memory_unmanaged_bytes{gpu="0"}', G)
    world.driver.change(0, used=0, processes=[])
    recorded.wait_for("gpulease_leases_over_limit", 0)
    world.driver.change(1, xids=[31])
    recorded.wait_for('gpulease_gpu_faults_total{gpu="1"}', 1)
    world.daemon.client.drain("1")
    recorded.wait_for('gpulease_gpu_state{gpu="1", state="drained"}', 1)
    failing = world.submit("1G", "exit 3")
    world.daemon.wait_until(failing, "ended")
    recorded.wait_for("gpulease_jobs_failed_total", 1)
    world.daemon.cancel(jobs[1])
    recorded.wait_for('gpulease_jobs_ended_total{outcome="cancelled"}', 2)
    recorded.wait_for("gpulease_lease_overruns_total", 1)
    recorded.wait_for("sum(gpulease_gpu_memory_leased_bytes)", 0)
    return world


def test_the_target_is_up(world: World) -> None:
    (target,) = world.prometheus.api("targets")["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    assert world.prometheus.value("up") == 1
    assert world.prometheus.value("gpulease_build_info") == 1


def test_the_life_of_jobs_is_recorded(story: World) -> None:
    recorded = story.prometheus
    assert recorded.value("gpulease_jobs_submitted_total") == 3
    assert recorded.value("gpulease_jobs_started_total") == 3
    ended = {
        each["metric"]["outcome"]: each["value"][1]
        for each in recorded.api("query", query="gpulease_jobs_ended_total")["result"]
    }
    assert {name: count for name, count in ended.items() if count != "0"} == {
        "cancelled": "2",
        "exited": "1",
    }
    assert ended["time_limit"] == "0", "increase() sees the first one"
    assert recorded.course('gpulease_jobs{state="queued"}')[:3] in ([1, 0], [0, 1, 0])
    assert recorded.course('gpulease_gpu_memory_leased_bytes{gpu="0"}')[-1] == 0
    leased = recorded.course("gpulease_user_memory_leased_bytes")
    assert [size for size in leased if size in (8 * G, 6 * G)][:2] == [8 * G, 6 * G]
    assert recorded.value("gpulease_job_wait_seconds_count") == 3
    held = recorded.value("gpulease_leased_byte_seconds_total")
    seconds = recorded.value("gpulease_leased_gpu_seconds_total")
    assert held is not None
    assert seconds is not None
    assert 1 * G < held / seconds < 8 * G


def test_the_gpus_are_recorded(story: World) -> None:
    recorded = story.prometheus
    assert recorded.value('gpulease_gpu_memory_total_bytes{gpu="1"}') == 4 * G
    assert recorded.value('gpulease_gpu_temperature_celsius{gpu="1"}') == 51
    assert recorded.value("gpulease_gpu_power_watts") == 120
    assert recorded.value("gpulease_gpu_power_limit_watts") == 300
    assert recorded.course('gpulease_gpu_utilization_ratio{gpu="0"}')[:2] == [0, 0.87]
    assert max(recorded.course('gpulease_gpu_memory_used_bytes{gpu="0"}')) == 8 * G
    assert recorded.value('gpulease_gpu_faults_total{kind="xid 31", cause="application"}') == 1
    assert recorded.value('gpulease_gpu_state{gpu="1", state="available"}') == 0


def test_the_dashboard_shows_data_in_each_panel(story: World) -> None:
    board = json.loads((DOCS / "grafana/gpulease.json").read_text())
    empty = []
    for panel in board["panels"]:
        for target in panel["targets"]:
            found = story.prometheus.series(_as_grafana_asks(target["expr"]))
            values = [float(value) for each in found for _, value in each["values"]]
            if not any(map(math.isfinite, values)):
                empty.append((panel["title"], target["expr"]))
    assert empty == []


def test_the_annotations_of_the_dashboard_tell_what_happened(story: World) -> None:
    board = json.loads((DOCS / "grafana/gpulease.json").read_text())
    found = {
        each["name"]: story.prometheus.series(_as_grafana_asks(each["expr"]))
        for each in board["annotations"]["list"]
    }
    ((_, at),) = {tuple(value) for value in found["Starts of the daemon"][0]["values"][-1:]}
    began = story.prometheus.value("gpulease_daemon_start_time_seconds")
    assert began is not None
    assert float(at) == pytest.approx(began * 1000)
    assert {each["metric"]["gpu"] for each in found["GPUs that take no leases"]} == {"1"}
    assert found["Pauses of the queue"] == []


def test_what_waits_is_recorded(story: World) -> None:
    recorded = story.prometheus
    assert 6 * G in recorded.course("sum(gpulease_user_memory_queued_bytes)")
    assert 1 in recorded.course("sum(gpulease_user_gpus_queued)")
    assert recorded.course("sum(gpulease_user_gpus_queued)")[-1] == 0
    assert recorded.course("gpulease_queue_oldest_wait_seconds")[-1] == 0
    assert max(recorded.course("gpulease_queue_oldest_wait_seconds")) > 0


def _as_grafana_asks(expression: str) -> str:
    """Replace the variables of the dashboard as Grafana does for all machines and the first GPU."""
    values = {"instance": ".*", "gpu": "0", "__rate_interval": "2s", "__range": "1m"}
    return re.sub(r"\$(\w+)", lambda found: values[found[1]], expression)


def test_the_alert_rules_are_loaded(story: World) -> None:
    (group,) = story.prometheus.api("rules")["groups"]
    assert {each["health"] for each in group["rules"]} == {"ok"}
    assert len(group["rules"]) > 10


def test_metrics_tell_a_stopped_daemon_from_a_stopped_web_server(story: World) -> None:
    recorded = story.prometheus
    began = recorded.value("gpulease_daemon_start_time_seconds")
    story.daemon.kill(signal.SIGKILL)
    recorded.wait_for("gpulease_daemon_up", 0)
    assert recorded.value("up") == 1
    recorded.wait_for("absent(gpulease_gpu_memory_total_bytes)", 1)
    story.daemon.start()
    recorded.wait_for("gpulease_daemon_up", 1)
    assert began is not None
    recorded.wait_for(f"gpulease_daemon_start_time_seconds > bool {began}", 1)
    assert recorded.value("sum(gpulease_jobs_submitted_total)") == 0, "counters begin again"
