"""What a job asks for."""

from dataclasses import dataclass
from datetime import timedelta

from gpulease.units import Share, format_size

LONGEST_TIME = timedelta(days=3650)
"""The longest time limit, also after it was extended."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A job's wish: so much memory on each of so many GPUs, for so long."""

    memory: int | Share
    """Bytes on each GPU, or a share of what a GPU has to lease."""
    gpus: int = 1
    exclusive: bool = False
    """Nobody else's lease on these GPUs, and no unmanaged process."""
    time_limit: timedelta | None = None

    def demand(self, allocatable: int) -> int:
        """Return the bytes asked for on a GPU that has `allocatable` bytes to lease."""
        return self.memory.of(allocatable) if isinstance(self.memory, Share) else self.memory

    def __str__(self) -> str:
        memory = str(self.memory) if isinstance(self.memory, Share) else format_size(self.memory)
        each = f"{memory} on each of {self.gpus} GPUs" if self.gpus > 1 else memory
        return f"{each}, exclusive" if self.exclusive else each
