"""How a daemon opens its record: never an empty or older one beside jobs that it does not know."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from gpulease.config import DATABASE_NAME, Settings
from gpulease.daemon.disk_space import free_space
from gpulease.domain.gpu import JobId
from gpulease.domain.lease import State
from gpulease.errors import RecordUnwritable, StateUnwritable, state_fault
from gpulease.host.state_dir import StateDirectory
from gpulease.store.database_file import last_job
from gpulease.store.engine import damaged
from gpulease.store.recovery import LEAP
from gpulease.store.store import SqlStore

_MOST_SHOWN = 8


def open_record(settings: Settings) -> tuple[StateDirectory, SqlStore, str]:
    """Take the state directory and open the record in it, with the name of this installation.

    Raises:
        StateUnusable: it cannot be used as it is.
        StateUnwritable: it cannot be used now; nothing is held, and it can be tried again.
    """
    with ExitStack() as stack:
        state = StateDirectory(settings.state)
        stack.callback(state.close)
        try:
            free_space(settings, 0)
        except OSError as error:
            raise state_fault(f"cannot use the state directory {state.path}", error) from error
        path, running = state.path / DATABASE_NAME, state.running()
        is_new = not path.exists() or path.stat().st_size == 0
        if is_new and running:
            what = "empty" if path.exists() else "missing"
            raise damaged(path, f"it is {what}, and {_jobs(running)}")
        taken = _taken(state, path) if is_new else state.last_job()
        store = SqlStore(path)
        stack.callback(store.close)
        try:
            _refuse_to_forget(running, store)
            # With a database that is new, or an old one put back, a job must not find another's
            # record.
            store.use_no_id_up_to(taken)
            installation = store.installation()
        except RecordUnwritable as error:
            raise StateUnwritable(error.message, error.hint) from error
        stack.pop_all()
    return state, store, installation


def _taken(state: StateDirectory, path: Path) -> int:
    """Return an id above all that may have been given before the database was removed."""
    last = max(state.last_job(), last_job(path))
    return last + LEAP if last else 0


def _refuse_to_forget(running: Sequence[int], store: SqlStore) -> None:
    """Refuse a database that does not know what runs: its memory would be leased again.

    Raises:
        StateUnusable: it is an older copy that was put back.
    """
    known = {number: store.job(JobId(number)) for number in running}
    lost = [number for number, job in known.items() if job is None or job.state is State.QUEUED]
    if lost:
        raise damaged(store.path, f"it does not know that {_jobs(lost)}; it may be an older copy")


def _jobs(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:_MOST_SHOWN]))
    shown += ", ..." if len(numbers) > _MOST_SHOWN else ""
    return f"job {shown} runs" if len(numbers) == 1 else f"jobs {shown} run"
