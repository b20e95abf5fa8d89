"""What Prometheus gets: names and units by its conventions, and nothing where nothing is known."""

import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import parser
from prometheus_client.core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from daemon_stand_in import views
from gpulease.units import MIB
from gpulease.web.metrics import DCGM, TABLE, UP, Seen, exposition
from gpulease.wire.machine import StatusView
from gpulease.wire.metrics import GpuFaultsView, HistogramView, MetricsView, UserMetricsView

DOCS = Path(__file__).parents[2] / "docs"
RULES = DOCS / "prometheus"
OPENMETRICS = "application/openmetrics-text;version=1.0.0"

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed: apt install prometheus"
)


def user(name: str, **changed: object) -> UserMetricsView:
    view = UserMetricsView(
        waits=HistogramView([1.0, 60.0], [5, 2, 1], 100.5), queued_memory=6, queued_gpus=2,
        user=name, submitted=3, requeued=0, started=2, failed=1, out_of_memory=0, over_lease=0,
        ended={"exited": 1}, jobs={"queued": 1, "granted": 0, "active": 1, "releasing": 0},
        gpu_seconds=7200.0, byte_seconds=3.0,
    )  # fmt: skip
    return replace(view, **changed)  # type: ignore[arg-type]


def counted(*names: str) -> MetricsView:
    histogram = HistogramView([1.0, 60.0], [5, 2, 1], 100.5)
    return MetricsView(
        version="1.2", at="2026-01-01T00:00:10.000Z", started_at="2026-01-01T00:00:00.000Z",
        observed_at=None, users=[user(name) for name in names],
        faults=[GpuFaultsView(views.FIRST, "xid 79", "hardware", 2)],
        waits=histogram, passes=histogram, failed_passes=0, commits=histogram, failed_commits=0,
        open_connections=1, refused_connections=0, failed_connections=0, database=None,
        cpu_seconds=1.5, resident=1 << 20,
    )  # fmt: skip


def seen(status: StatusView | None = None, *names: str) -> Seen:
    return Seen(status or views.busy_status(), counted(*(names or ("alice", "bob"))))


def drawn(of: Seen | None, *, by_job: bool = False) -> dict[str, Metric]:
    """Return the families of the text format by name."""
    text = exposition(of, "", by_job=by_job)[0].decode()
    return {each.name: each for each in parser.text_string_to_metric_families(text)}


def values(family: Metric) -> dict[tuple[str, ...], float]:
    return {tuple(each.labels.values()): each.value for each in family.samples}


def test_names_follow_the_conventions_of_prometheus() -> None:
    names = [row.name for row in TABLE]
    assert sorted(set(names)) == sorted(names)
    for row in TABLE:
        assert re.fullmatch(r"gpulease(_[a-z]+)+", row.name), row.name
        assert row.name.endswith("_total") is (row.kind == "counter"), row.name
        assert row.name.endswith("_info") is (row.kind == "info"), row.name
        assert row.meaning[-1] in ".", row.name
        assert "job" not in row.labels or row.by_job, row.name


def test_gpus_have_the_names_of_dcgm_only_where_that_was_asked_for() -> None:
    assert not any(name.startswith("DCGM") for name in drawn(seen()))
    text = exposition(seen(), "", by_job=False, dcgm=True)[0].decode()
    found = {each.name: each for each in parser.text_string_to_metric_families(text)}
    assert {row.name for row in DCGM} < found.keys()
    gpu, *_ = views.busy_status().gpus
    sample = found["DCGM_FI_DEV_FB_USED"].samples[0]
    assert sample.labels == {
        "gpu": "0", "UUID": gpu.uuid, "device": "nvidia0", "modelName": gpu.name,
        "Hostname": views.busy_status().host,
    }  # fmt: skip
    assert sample.value == (gpu.memory.used or 0) // MIB
    ours = values(found["gpulease_gpu_utilization_ratio"])
    theirs = {each.labels["UUID"]: each.value for each in found["DCGM_FI_DEV_GPU_UTIL"].samples}
    assert theirs == {uuid: ratio * 100 for (_, uuid), ratio in ours.items()}


@needs_promtool
@pytest.mark.parametrize("by_job", [False, True])
def test_promtool_accepts_all_metrics(by_job: bool) -> None:
    text = exposition(seen(), "", by_job=by_job)[0]
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_the_accept_header_chooses_the_format() -> None:
    _, plain = exposition(seen(), "*/*", by_job=False)
    body, media_type = exposition(seen(), OPENMETRICS, by_job=True)
    assert plain.startswith("text/plain; version=0.0.4")
    assert media_type.startswith("application/openmetrics-text; version=1.0.0")
    families = {each.name: each for each in text_string_to_metric_families(body.decode())}
    assert len(families) == len(TABLE)
    assert families["gpulease_gpu_memory_leased_bytes"].unit == "bytes"
    assert families["gpulease_leased_gpu_seconds"].unit == "seconds"


def test_without_a_daemon_there_is_one_sample_that_says_so() -> None:
    (family,) = drawn(None).values()
    assert (family.name, values(family)) == (UP.name, {(): 0.0})


def test_what_is_unknown_has_no_sample() -> None:
    gpu = views.gpu(utilization=None, memory=views.memory(used=None, unmanaged=None))
    families = drawn(seen(replace(views.status(), gpus=[gpu], jobs=[])))
    for name in ("utilization_ratio", "memory_used_bytes", "memory_unmanaged_bytes", "power_watts"):
        assert families[f"gpulease_gpu_{name}"].samples == []
    assert families["gpulease_database_size_bytes"].samples == []
    assert families["gpulease_daemon_last_observation_timestamp_seconds"].samples == []
    assert len(families["gpulease_gpu_memory_total_bytes"].samples) == 1


def test_the_use_of_a_user_is_unknown_while_that_of_one_job_is() -> None:
    status = views.busy_status()
    first, *_ = (job for job in status.jobs if job.leases)
    before = values(drawn(seen(status, first.user))["gpulease_user_memory_used_bytes"])
    assert before[first.user,] > 0
    first.leases[0].used = None
    families = drawn(seen(status, first.user))
    assert (first.user,) not in values(families["gpulease_user_memory_used_bytes"])
    assert (first.user,) in values(families["gpulease_user_memory_leased_bytes"])


def test_durations_are_counted_as_prometheus_counts() -> None:
    family = drawn(seen())["gpulease_job_wait_seconds"]
    assert {each.labels["user"] for each in family.samples} == {"alice", "bob"}
    found = {
        (each.name.rpartition("_")[2], each.labels.get("le")): each.value
        for each in family.samples
        if each.labels["user"] == "bob"
    }
    assert found == {
        ("bucket", "1.0"): 5, ("bucket", "60.0"): 7, ("bucket", "+Inf"): 8,
        ("count", None): 8, ("sum", None): 100.5,
    }  # fmt: skip


def test_the_age_of_the_oldest_job_in_the_queue_is_0_without_one() -> None:
    name = "gpulease_queue_oldest_wait_seconds"
    none = seen()
    waits = replace(
        none, counted=replace(none.counted, oldest_queued_at="2026-01-01T00:00:08.500Z")
    )
    assert values(drawn(none)[name]) == {(): 0}
    assert values(drawn(waits)[name]) == {(): 1.5}
    assert values(drawn(waits)["gpulease_user_gpus_queued"]) == {("alice",): 2, ("bob",): 2}


def test_each_gpu_is_in_one_state() -> None:
    family = drawn(seen(views.troubled_status()))["gpulease_gpu_state"]
    states = Counter(each.labels["uuid"] for each in family.samples if each.value == 1)
    assert set(states.values()) == {1}
    assert len(states) == len(views.troubled_status().gpus)


def test_the_users_that_the_daemon_does_not_count_by_name_are_no_label() -> None:
    status = views.busy_status()
    owners = {job.user for job in status.jobs if job.leases}
    leased = sum(lease.memory for job in status.jobs for lease in job.leases)
    families = drawn(seen(status, "other"), by_job=True)
    assert owners
    assert values(families["gpulease_user_memory_leased_bytes"]) == {("other",): leased}
    for family in families.values():
        assert {each.labels.get("user", "other") for each in family.samples} <= {"other"}


def test_jobs_are_labels_only_where_that_was_asked_for() -> None:
    without, with_jobs = drawn(seen()), drawn(seen(), by_job=True)
    assert not any("job" in each.labels for one in without.values() for each in one.samples)
    found = with_jobs["gpulease_job_memory_leased_bytes"].samples
    assert {each.labels["job"] for each in found} == {
        job.label or str(job.id) for job in views.busy_status().jobs if job.leases
    }


@needs_promtool
def test_the_alert_rules_are_sound_and_each_fires_when_it_should() -> None:
    for what in ("check rules alerts.yml", "test rules alerts_test.yml"):
        done = subprocess.run(
            ["promtool", *what.split()], cwd=RULES, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


_BEYOND = {"definition", "maxPerRow", "titleFormat", "useValueForTime", "step"}
"""Fields that Grafana has and its schema leaves to the data source or leaves out."""


def test_the_dashboard_has_no_field_that_grafana_does_not_know() -> None:
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    cog = pytest.importorskip("grafana_foundation_sdk.cog.plugins")
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder")
    cog.register_default_plugins()
    board = json.loads((DOCS / "grafana/gpulease.json").read_text())
    read = models.Dashboard.from_json(board)
    assert {*unknown(board, json.loads(json.dumps(read, cls=encoder.JSONEncoder)))} == _BEYOND


def unknown(ours: object, theirs: object, name: str = "") -> Iterator[str]:
    """Yield the names of fields that were not read, or were read as something else."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key, value in ours.items():
            yield from unknown(value, theirs.get(key), key)
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for one, other in zip(ours, theirs, strict=True):
            yield from unknown(one, other, name)
    elif ours != theirs:
        yield name


def test_rules_and_the_dashboard_name_metrics_that_exist() -> None:
    known = {row.name for row in TABLE}
    known |= {f"{row.name}_bucket" for row in TABLE if row.kind == "histogram"}
    board = json.loads((DOCS / "grafana/gpulease.json").read_text())
    texts = [each["expr"] for panel in board["panels"] for each in panel["targets"]]
    texts += [each["expr"] for each in board["annotations"]["list"]]
    assert all("$instance" in text for text in texts)
    texts += [each["definition"] for each in board["templating"]["list"] if "definition" in each]
    rules = (RULES / "alerts.yml").read_text()
    named = {name for text in (*texts, rules) for name in re.findall(r"gpulease_\w+", text)}
    assert named <= known
    alerts = set(re.findall(r"alert: (\w+)", rules))
    tested = set(re.findall(r'alertname="(\w+)"', (RULES / "alerts_test.yml").read_text()))
    assert alerts == tested
