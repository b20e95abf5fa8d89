"""What the daemon's other parts are built on: the database, the GPUs, the clock and the threads.

A daemon never opens an empty or older database beside running jobs that it does not contain: their
memory would be leased again.
"""

import faulthandler
import logging
import os
import signal
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from gpulease.config import DATABASE_NAME, Settings
from gpulease.daemon.job_output import free_space
from gpulease.daemon.worker_threads import ObservationThread, WriterThread
from gpulease.errors import (
    BadConfiguration,
    BadValue,
    RecordUnwritable,
    StateUnwritable,
    state_fault,
)
from gpulease.gpu.nvml import NvmlProbe
from gpulease.gpu.nvml_process import NvmlProcess
from gpulease.gpu.simulated import SimulatedGpu, SimulatedGpus, parse_simulation
from gpulease.host.process_finder import claims
from gpulease.host.state_dir import CRASH, StateDirectory
from gpulease.service.ports import Clock
from gpulease.shim.linux import die_with_parent
from gpulease.store.database_file import last_possible_id
from gpulease.store.engine import damaged
from gpulease.store.schema import is_current
from gpulease.store.store import SqlStore

_log = logging.getLogger(__name__)

_MOST_SHOWN = 8
_IN_NVML = "/gpulease/gpu/nvml_binding.py"


class CurrentSettings:
    """The settings, which a reload replaces; call it for the present ones."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def __call__(self) -> Settings:
        """Return the settings as they are now."""
        return self._settings

    def replace(self, settings: Settings) -> None:
        """Use `settings` from now on."""
        self._settings = settings


@dataclass(frozen=True, slots=True)
class Foundation:
    """The parts that depend on no other part."""

    settings: CurrentSettings
    state: StateDirectory
    store: SqlStore
    installation: str
    """Distinguishes this daemon's processes from those of other daemons on the machine."""
    secret: str
    """What the markers of its jobs are made with."""
    probe: NvmlProbe | NvmlProcess | SimulatedGpus
    clock: Clock
    writer: WriterThread
    observation_thread: ObservationThread

    @property
    def is_simulated(self) -> bool:
        """Whether the GPUs are simulated."""
        return self.settings().simulate is not None


def open_foundation(settings: Settings, clock: Clock) -> Foundation:
    """Lock the state directory, and open the database and the GPUs.

    Raises:
        GpuleaseError: the daemon cannot run.
    """
    state, store, (installation, secret) = open_record(settings)
    nvml_crashed = crashed_in_nvml(_log_last_crash(state.path / CRASH))
    return Foundation(
        settings=CurrentSettings(settings),
        state=state,
        store=store,
        installation=installation,
        secret=secret,
        probe=open_probe(settings, store, nvml_crashed=nvml_crashed),
        clock=clock,
        writer=WriterThread("writer", store.batch),
        observation_thread=ObservationThread(),
    )


def _log_last_crash(file: Path) -> str:
    """Log and return what the last daemon wrote as it crashed; have this one write there too."""
    try:
        text = file.read_text(errors="replace") if file.exists() else ""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(file, flags, 0o600)
    except OSError:
        return ""  # it writes to stderr
    faulthandler.enable(descriptor)
    if text:
        _log.error("the last gpuleased crashed:\n%s", text)
    return text


def crashed_in_nvml(text: str) -> bool:
    """Return whether a call of NVML has crashed the daemon that wrote `text` by its faulthandler.

    A second thread that crashes meanwhile cuts the text short. Only calls of NVML crash together:
    each GPU has a thread for its readings.
    """
    _, is_told, rest = text.partition("Current thread ")
    return _IN_NVML in rest.partition("\n\n")[0] if is_told else bool(text)


def open_probe(
    settings: Settings, store: SqlStore, *, nvml_crashed: bool = False
) -> NvmlProbe | NvmlProcess | SimulatedGpus:
    """Open the simulated GPUs if the settings ask for them, else the real ones.

    `nvml_crashed`: a call of NVML has ended the last daemon.

    Raises:
        NoGpus: the machine has none.
        BadConfiguration: the simulation cannot be parsed.
    """
    if settings.simulate is not None:
        gpus = simulated_gpus(settings.simulate)
        return SimulatedGpus(gpus, str(settings.state), lambda: claims(store.holding()))
    if nvml_crashed:
        probe = NvmlProcess(settings.driver_deadline)
        _log.error(probe.restriction())
        return probe
    return NvmlProbe.open(settings.driver_deadline)


def simulated_gpus(text: str) -> Sequence[SimulatedGpu]:
    """Return the GPUs to simulate.

    Raises:
        BadConfiguration: `text` cannot be parsed.
    """
    try:
        return parse_simulation(text)
    except BadValue as error:
        raise BadConfiguration(error.message, error.hint) from error


def open_record(settings: Settings) -> tuple[StateDirectory, SqlStore, tuple[str, str]]:
    """Lock the state directory and open its database; also return the name of the installation
    and its secret.

    Raises:
        StateUnusable: it cannot be used without a change.
        StateUnwritable: it cannot be used now. Nothing is held, so the caller may try again.
    """
    with ExitStack() as stack:
        state = StateDirectory(settings.state)
        stack.callback(state.close)
        try:
            free_space(settings, 0)
        except OSError as error:
            raise state_fault(f"cannot use the state directory {state.path}", error) from error
        path, numbers = state.path / DATABASE_NAME, state.numbers()
        is_new = not path.exists() or path.stat().st_size == 0
        if is_new and (running := state.running(numbers)):
            what = "empty" if path.exists() else "missing"
            raise damaged(path, f"it is {what}, and {_jobs(running)}")
        taken = max(numbers, default=0)
        if is_new:
            taken = last_possible_id(path, taken)
        if not is_new:
            _migrate(path)
        store = SqlStore(path)
        stack.callback(store.close)
        try:
            if running := state.running(store.never_started(numbers)):
                # Their memory would be leased again.
                what = f"{_jobs(running)} without a record in it; it may be an older copy"
                raise damaged(path, what)
            # With a new or restored database, a job must not get the directory of another job.
            store.skip_ids_up_to(taken)
            identity = store.installation(), store.secret()
        except RecordUnwritable as error:
            raise StateUnwritable(error.message, error.hint) from error
        stack.pop_all()
    return state, store, identity


def _migrate(path: Path) -> None:
    """Migrate the database in a child: what that imports (11 MiB) ends with the child.

    The child also creates it in a file that an earlier start left empty.

    If it fails, the daemon tries again when it opens the database, and reports why.
    """
    if is_current(path):
        return
    if child := os.fork():
        with suppress(ChildProcessError):  # this process was started with SIGCHLD ignored
            os.waitpid(child, 0)
        return
    try:
        die_with_parent(signal.SIGKILL)  # otherwise it would keep the lock of the state directory
        SqlStore(path).close()
    finally:
        os._exit(0)


def _jobs(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:_MOST_SHOWN]))
    shown += ", ..." if len(numbers) > _MOST_SHOWN else ""
    return f"job {shown} runs" if len(numbers) == 1 else f"jobs {shown} run"
