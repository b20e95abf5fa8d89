"""The lease as the hooks see it, read from the variable that the daemon set."""

import json
from typing import Any

MIB = 2**20


class LeaseTooSmall(RuntimeError):
    """The framework's context and libraries alone would fill the lease."""


class Lease:
    """What the job was granted; sizes are bytes, except where MiB is named."""

    def __init__(self, raw: str) -> None:
        fields: dict[str, Any] = json.loads(raw)
        self.simulated: bool = fields["simulated"]
        self.visible: str = fields["visible"]
        """CUDA_VISIBLE_DEVICES as leased."""
        self.gpus: list[dict[str, Any]] = fields["gpus"]
        self.options: dict[str, Any] = fields["options"]
        self._outside: dict[str, int] = fields["outside"]
        self._smallest: dict[str, int] = fields["smallest"]
        self._advised: dict[str, str] = fields.get("advised", {})
        """The smallest leases, rounded up and formatted; an older daemon sends none."""
        self.job: str = fields["job"]
        self.daemon: str = fields.get("daemon", "")
        """The socket on which the daemon takes memory reports; "" for none."""
        self.lifted = False
        """It was released and limits nothing any more."""

    def lift(self) -> None:
        """Limit nothing from now on."""
        self.lifted = True

    def named(self, value: str) -> "list[dict[str, Any]]":
        """Return the GPUs that a value of CUDA_VISIBLE_DEVICES names, in its order."""
        known = dict(zip(self.visible.split(","), self.gpus))
        return [known[entry] for entry in value.split(",") if entry in known]

    def pools(self, framework: str, entries: "list[str]") -> "list[tuple[int, int]]":
        """Return (pool limit, total) in MiB of each GPU that the visible devices `entries` name."""
        return [
            (gpu["pools"][framework] // MIB, gpu["total"] // MIB)
            for gpu in self.named(",".join(entries))
        ]

    def limit(self, framework: str, gpu: "dict[str, Any]") -> int:
        """Return the pool limit of `framework` on a GPU; an older daemon does not know all."""
        pools = gpu["pools"]
        return int(pools.get(framework, min(pools.values())))

    def check(self, framework: str, title: str) -> None:
        """Refuse a lease that leaves `framework` no usable pool.

        Raises:
            LeaseTooSmall: with the smallest lease that is large enough.
        """
        smallest = self._smallest.get(framework, 0)
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
    """Format bytes as users write them: 4G, 512M."""
    gib, rest = divmod(amount, 1024 * MIB)
    return "%dG" % gib if not rest else "%dM" % -(-amount // MIB)
