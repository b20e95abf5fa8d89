"""A process that takes memory of the first GPU through CUDA itself, and stays: no framework needed.

It allocates as `gpulease doctor --prove` does, so that a driver is all that these tests ask for.
"""

import json
import subprocess
import sys
from types import TracebackType
from typing import Self

GPU_PATIENCE_S = 600.0
"""A framework may compile for minutes for a GPU that it has no code for."""


class CannotAllocate(Exception):
    """There is no CUDA here, or it gave nothing; the text says which."""


def command(size: int, stays_s: float = 600.0) -> list[str]:
    """Return what takes `size` bytes in steps of 32 MiB and stays, telling each step.

    It does not pause between them, which takes minutes on a large GPU.
    """
    taking = f"prover.PAUSE_S = 0; prover.allocate('device', {size}, {stays_s})"
    return [sys.executable, "-I", "-c", f"from gpulease.worker import prover; {taking}"]


class Allocator:
    """Such a process, outside any lease, for as long as the `with` block lasts."""

    def __init__(self, size: int) -> None:
        """Take `size` bytes.

        Raises:
            CannotAllocate: on entering; see there.
        """
        self._size = size

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(command(self._size), stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told = json.loads(line)
            if "held" not in told:
                self._end()
                raise CannotAllocate(told.get("cannot") or told.get("why") or line)
            if told["held"] >= self._size:
                return self
        self._end()
        raise CannotAllocate("it ended before it had allocated")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _end(self) -> None:
        self._process.kill()
        self._process.communicate()
