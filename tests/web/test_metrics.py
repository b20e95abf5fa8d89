"""The metrics over HTTP, from a real daemon: formats, jobs as labels, and a daemon that is away."""

from prometheus_client import parser
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from daemon_rig import Daemon, wait_for
from gpulease.web.metrics import TABLE
from web.rig import Web

G = 1 << 30
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"


def scrape(served: Web, path: str = "/metrics") -> Samples:
    """Return the samples by name and labels."""
    reply = served.get(path)
    assert (reply.status, reply.headers["content-type"][:10]) == (200, "text/plain")
    return {
        (each.name, frozenset(each.labels.items())): each.value
        for family in parser.text_string_to_metric_families(reply.text)
        for each in family.samples
    }


def total(samples: Samples, name: str) -> float:
    return sum(value for (each, _), value in samples.items() if each == name)


def test_a_scrape_shows_the_jobs_of_the_daemon(daemon: Daemon, served: Web) -> None:
    job = daemon.submit("--mem", "3G", "sleep", "600")
    daemon.wait_until(job, "active")
    ended = daemon.submit("--mem", "1G", "false")
    daemon.wait_until(ended, "ended")
    wait_for(
        "both are counted",
        lambda: total(scrape(served), "gpulease_jobs_failed_total") == 1,
    )
    samples = scrape(served)
    assert total(samples, "gpulease_gpu_memory_leased_bytes") == 3 * G
    assert total(samples, "gpulease_jobs_submitted_total") == 2
    assert total(samples, "gpulease_jobs") == 1
    assert total(samples, "gpulease_job_wait_seconds_count") == 2
    assert total(samples, "gpulease_database_commit_duration_seconds_count") > 2
    assert total(samples, "gpulease_scheduler_pass_duration_seconds_count") > 1
    assert total(samples, "gpulease_daemon_resident_memory_bytes") > 16 << 20
    assert total(samples, "gpulease_database_size_bytes") > 4096
    assert not any("job" in dict(labels) for _, labels in samples)
    by_job = {labels for _, labels in scrape(served, "/metrics?jobs=1") if "job" in dict(labels)}
    assert {dict(labels)["job"] for labels in by_job} == {str(job)}
    assert "DCGM_FI_DEV_GPU_UTIL" in served.get("/metrics?dcgm=1").text
    assert "DCGM" not in served.get("/metrics").text


def test_openmetrics_is_served_to_those_who_ask_for_it(served: Web) -> None:
    reply = served.get("/metrics", Accept=OPENMETRICS)
    assert reply.headers["content-type"].startswith("application/openmetrics-text")
    names = {each.name for each in text_string_to_metric_families(reply.text)}
    assert len(names) == sum(not row.by_job for row in TABLE)
    assert (served.get("/metrics", "HEAD").status, served.get("/metrics", "POST").status) == (
        200,
        405,
    )
