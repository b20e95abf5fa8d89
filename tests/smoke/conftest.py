"""One real daemon for each file, with two simulated GPUs of 8 GiB; each test finds it empty."""

from collections.abc import Callable, Iterator

import pytest

from daemon_rig import Daemon, daemons


@pytest.fixture(scope="module")
def make_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Daemon]]:
    """Yield a maker of daemons, which are ended after the last test of a file."""
    with daemons(tmp_path_factory.mktemp("smoke")) as make:
        yield make


@pytest.fixture(scope="module")
def standing(make_daemon: Callable[..., Daemon]) -> Daemon:
    """Return the daemon of a file."""
    settings = {"grace": "2s", "overuse_tolerance": "32M", "overuse_grace": "1s"}
    made: Daemon = make_daemon(settings=settings)
    return made.start()


@pytest.fixture
def daemon(standing: Daemon) -> Iterator[Daemon]:
    """Yield the daemon of a file, and cancel what a test left in it."""
    yield standing
    standing.close_all()
    standing.end_jobs()
