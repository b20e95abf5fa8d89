"""The lease as the hooks see it: read once from the variable that the daemon wrote."""

from __future__ import annotations

import json
from typing import Any

MIB = 2**20


class LeaseTooSmall(RuntimeError):
    """The framework's context and libraries alone would fill the lease."""


class Lease:
    """What this job was granted; sizes in MiB, which is what TensorFlow counts in."""

    def __init__(self, raw: str) -> None:
        fields: dict[str, Any] = json.loads(raw)
        self.simulated: bool = fields["simulated"]
        self.visible: str = fields["visible"]
        """CUDA_VISIBLE_DEVICES as it was leased."""
        self.gpus: list[dict[str, Any]] = fields["gpus"]
        self.options: dict[str, Any] = fields["options"]
        self._outside: dict[str, int] = fields["outside"]
        self._smallest: dict[str, int] = fields["smallest"]
        self._advised: dict[str, str] = fields.get("advised", {})
        """Sizes to ask for, no smaller than those; an older daemon sends none."""
        self.job: str = fields["job"]
        self.daemon: str = fields.get("daemon", "")
        """The socket on which the daemon hears what a job says of its memory; "": on none."""
        self.lifted = False
        """It was given back, and limits nothing any more."""

    def lift(self) -> None:
        """Limit nothing from now on."""
        self.lifted = True

    def named(self, value: str) -> list[dict[str, Any]]:
        """Return the GPUs that a value of CUDA_VISIBLE_DEVICES names, in its order."""
        known = dict(zip(self.visible.split(","), self.gpus))  # noqa: B905  (Python 3.7)
        return [known[entry] for entry in value.split(",") if entry in known]

    def pools(self, framework: str, entries: list[str]) -> list[tuple[int, int]]:
        """Return (limit, capacity) of each GPU that the visible devices `entries` name."""
        known = dict(zip(self.visible.split(","), self.gpus))  # noqa: B905  (Python 3.7)
        return [
            (known[entry]["pools"][framework] // MIB, known[entry]["total"] // MIB)
            for entry in entries
            if entry in known
        ]

    def check(self, framework: str, title: str) -> None:
        """Refuse a lease that leaves `framework` no pool worth the name.

        Raises:
            LeaseTooSmall: with the smallest lease that would do.
        """
        smallest = self._smallest[framework]
        memory = min(gpu["memory"] for gpu in self.gpus)
        if memory >= smallest:
            return
        raise LeaseTooSmall(
            "cannot run {0} in a lease of {1}: beside its own pool it needs about {2} on each GPU, "
            "for the CUDA context and libraries\n\n"
            "hint: ask for --mem {3}".format(
                title,
                size(memory),
                size(self._outside[framework]),
                self._advised.get(framework) or size(smallest),
            )
        )


def size(amount: int) -> str:
    """Write bytes as a person would ask for them: 4G, 512M."""
    gib, rest = divmod(amount, 1024 * MIB)
    return "%dG" % gib if not rest else "%dM" % -(-amount // MIB)
