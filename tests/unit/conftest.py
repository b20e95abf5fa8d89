"""What several unit tests share."""

import time
from collections.abc import Iterator

import pytest


@pytest.fixture
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make Berlin, which has summer time, the machine's time zone."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Europe/Berlin")
        time.tzset()
        yield
    time.tzset()
