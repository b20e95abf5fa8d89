"""The same machine as in memory, over a real SQLite file: few examples, since each writes one."""

import tempfile
from contextlib import closing
from pathlib import Path

from hypothesis import HealthCheck, settings

from gpulease.domain.gpu import JobId
from gpulease.domain.job import Job
from gpulease.store.store import SqlStore
from unit.test_machine import Machine


class SqlMachine(Machine):
    """After each run the file is opened anew, and must hold exactly what the store held."""

    def make_store(self) -> SqlStore:  # type: ignore[override]
        self.folder = tempfile.TemporaryDirectory()
        return SqlStore(Path(self.folder.name) / "gpulease.db")

    def teardown(self) -> None:
        if not hasattr(self, "folder"):
            return
        with self.folder:
            self.is_found_again()

    def is_found_again(self) -> None:
        store = self.store
        assert isinstance(store, SqlStore)
        before = store.live()
        ended = {job: store.job(JobId(job)) for job in self.ended}
        store.close()
        with closing(SqlStore(store.path)) as again:
            assert again.live() == before
            for job, how in ended.items():
                assert isinstance(how, Job)
                assert again.job(JobId(job)) == how


TestSqlMachine = SqlMachine.TestCase
TestSqlMachine.settings = settings(
    max_examples=15,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
