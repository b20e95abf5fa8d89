"""Clusters for the tests of gpulease under Slurm."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon_rig import wait_for
from system.root import NoDebian

from .cluster import Cluster, obstacle
from .leased_cluster import leases
from .release import chosen_release, release


@pytest.fixture
def idle(cluster: Cluster) -> Iterator[Cluster]:
    """Return the cluster of the module, and leave it without jobs and leases."""
    yield cluster
    for user in ("alice", "bob"):
        cluster.run("scancel", f"--user={user}", user="root")
    wait_for("no lease is left", lambda: not any(map(leases, cluster.nodes.values())))
    cluster.wait_until_idle()


_FIRST = ("test_node.py", "test_setup.py", "test_views.py")
"""Half of the tests: each worker begins with an equal part of all, and one had all of these."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put half of the tests first; skip all where no cluster of the release asked for can run."""
    items.sort(key=lambda item: item.path.name not in _FIRST)
    here = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    if here and (why := obstacle() or _no_release()):
        for item in here:
            item.add_marker(pytest.mark.skip(reason=why))


def _no_release() -> str | None:
    version = chosen_release()
    try:
        return None if version is None else str(release(version)) and None
    except NoDebian as error:
        return f"no Slurm {version}: {str(error)[-300:]}"
