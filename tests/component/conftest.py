"""A database, the directory of a job, and what stands in for a daemon and for a shim."""

import pwd
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon_stand_in.daemon import StandIn
from daemon_stand_in.shim import ShimStandIn
from fakes import NOON, reading
from gpulease.store.store import SqlStore
from process_rig import ephemeral_user, job_directory


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqlStore]:
    """Yield a database that knows one GPU."""
    opened = SqlStore(tmp_path / "gpulease.db")
    with opened.write() as tx:
        tx.add_gpus([reading()], NOON)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def user() -> Iterator[pwd.struct_passwd]:
    """Yield a user who is on record while the tests of a file run."""
    with ephemeral_user() as made:
        yield made


@pytest.fixture
def directory() -> Iterator[Path]:
    """Yield the directory of a job; no shim is left in it."""
    with job_directory() as made:
        yield made


@pytest.fixture(params=["quick", "typer"])
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run each test twice: the line is read by the quick parser, and by typer."""
    if request.param == "typer":
        monkeypatch.setenv("GPULEASE_QUICK_PARSER", "off")
    return str(request.param)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[StandIn]:
    """Yield a daemon that says what a test tells it to; some files have one of their own."""
    stand_in = StandIn(tmp_path / "daemon.sock")
    stand_in.open()
    yield stand_in
    stand_in.close()


@pytest.fixture
def shim(tmp_path: Path, daemon: StandIn) -> Iterator[ShimStandIn]:
    """Yield the shim of a job whose directory is `job` in the folder of the test."""
    directory = tmp_path / "job"
    directory.mkdir()
    with ShimStandIn(directory, lambda: daemon.hear_the_end(directory)) as stand_in:
        yield stand_in
