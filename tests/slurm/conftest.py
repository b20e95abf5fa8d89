"""Clusters for the tests of gpulease under Slurm."""

from pathlib import Path

import pytest

from .cluster import obstacle


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip where no cluster can run."""
    here = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    if here and (why := obstacle()):
        for item in here:
            item.add_marker(pytest.mark.skip(reason=why))
