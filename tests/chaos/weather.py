"""What happens on the machine beside the jobs: strangers, lost GPUs, XIDs, calls that fail.

Calls fail one by one, by chance, and for a moment all that ask a GPU the same question: a single
failure often passes when the driver is asked again.
"""

import random
import subprocess
import threading
import time
from contextlib import suppress

from chaos.truth import Loss, Stranger, Truth
from nvml_stand_in import StandIn

G = 1 << 30
_STEP_S = 0.05
_MOST_STRANGERS = 4
_PROGRAMS_XIDS = (13, 31, 43, 69)
"""XIDs that programs cause: none of them drains a GPU."""
_QUESTIONS = (
    "nvmlDeviceGetComputeRunningProcesses*",
    "nvmlDeviceGetGraphicsRunningProcesses*",
    "nvmlDeviceGetMemoryInfo*",
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGet*",
)
_NO_ANSWER = (10, 19, 21, 999)
"""NVML's timeout, in use, no data, and unknown error."""


class Weather:
    """One thread that changes the machine, and writes down what it does and when."""

    def __init__(
        self,
        stand_in: StandIn,
        truth: Truth,
        rng: random.Random,
        share: float,
        *,
        silences: bool,
    ) -> None:
        """`share` of all calls fail; `silences` has GPUs not answer one question for a moment."""
        self._stand_in = stand_in
        self._truth = truth
        self._rng = rng
        self._share = share
        self._silences = silences
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._alive: list[tuple[float, Stranger, subprocess.Popen[bytes]]] = []
        self._lost: list[tuple[float, Loss]] = []
        self._silent: list[tuple[float, int]] = []
        """The GPUs that do not answer a question for the moment, and until when."""
        self.error: BaseException | None = None

    def begin(self) -> None:
        self._stand_in.update(chance=(self._share, self._rng.getrandbits(48)))
        self._thread.start()

    def end(self) -> None:
        """Let the machine be whole and quiet again."""
        self._over.set()
        self._thread.join()
        for _, stranger, process in self._alive:
            self._leaves(stranger, process)
        for _, loss in self._lost:
            self._returns(loss)
        for _, index in self._silent:
            self._stand_in.change(index, faults={})
        self._stand_in.update(chance=(0, 0))
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            while not self._over.wait(_STEP_S):
                self._step(time.time())
        except BaseException as error:  # noqa: BLE001 - raised again by `end`
            self.error = error

    def _step(self, now: float) -> None:
        for entry in [each for each in self._alive if each[0] < now]:
            self._alive.remove(entry)
            self._leaves(*entry[1:])
        for gone in [each for each in self._lost if each[0] < now]:
            self._lost.remove(gone)
            self._returns(gone[1])
        for silent in [each for each in self._silent if each[0] < now]:
            self._silent.remove(silent)
            self._stand_in.change(silent[1], faults={})
        if len(self._alive) < _MOST_STRANGERS and self._rng.random() < _STEP_S / 0.6:
            self._comes()
        if not self._lost and self._rng.random() < _STEP_S / 5:
            self._loses()
        if self._silences and not self._silent and self._rng.random() < _STEP_S / 3:
            self._falls_silent(now)
        if self._rng.random() < _STEP_S / 4:
            self._errs()

    def _comes(self) -> None:
        index = self._rng.randrange(len(self._stand_in.gpus))
        gpu = self._stand_in.gpus[index].uuid
        free, lasts = self._free(index) // G, self._rng.uniform(0.3, self._rng.choice((3, 3, 12)))
        if free < 1:
            return
        memory = self._rng.randint(1, free) * G
        process = subprocess.Popen(["sleep", "600"])
        before = time.time()
        (self._stand_in.held(index) / str(process.pid)).write_text(str(memory))
        stranger = Stranger((before, time.time()), gpu=gpu, memory=memory, pid=process.pid)
        self._truth.strangers.append(stranger)
        self._alive.append((before + lasts, stranger, process))

    def _free(self, index: int) -> int:
        """Return what is free on a GPU now, leased or not: strangers do not ask."""
        used = 0
        for file in self._stand_in.held(index).iterdir():
            with suppress(OSError, ValueError):
                used += int(file.read_text())
        return min(self._truth.totals[self._stand_in.gpus[index].uuid] - used, 14 * G)

    def _leaves(self, stranger: Stranger, process: subprocess.Popen[bytes]) -> None:
        index = [card.uuid for card in self._stand_in.gpus].index(stranger.gpu)
        before = time.time()
        (self._stand_in.held(index) / str(process.pid)).unlink()
        stranger.ended_at = (before, time.time())
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()

    def _loses(self) -> None:
        index = self._rng.randrange(len(self._stand_in.gpus))
        before = time.time()
        self._stand_in.change(index, lost=True)
        loss = Loss((before, time.time()), gpu=self._stand_in.gpus[index].uuid)
        self._truth.losses.append(loss)
        self._lost.append((before + self._rng.uniform(0.5, self._rng.choice((4, 4, 4, 12))), loss))

    def _returns(self, loss: Loss) -> None:
        index = [card.uuid for card in self._stand_in.gpus].index(loss.gpu)
        before = time.time()
        self._stand_in.change(index, lost=False)
        loss.ended_at = (before, time.time())

    def _falls_silent(self, now: float) -> None:
        index = self._rng.randrange(len(self._stand_in.gpus))
        faults = {self._rng.choice(_QUESTIONS): self._rng.choice(_NO_ANSWER)}
        self._stand_in.change(index, faults=faults)
        self._silent.append((now + self._rng.uniform(0.1, 1.5), index))

    def _errs(self) -> None:
        index = self._rng.randrange(len(self._stand_in.gpus))
        xids = self._stand_in.gpus[index].xids
        storm = [self._rng.choice(_PROGRAMS_XIDS)] * self._rng.choice((1, 10, 500))
        self._stand_in.change(index, xids=[*xids, *storm])
