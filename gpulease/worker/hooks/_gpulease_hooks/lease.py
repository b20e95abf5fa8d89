"""The lease as the hooks see it, read from the variable that the daemon set."""

import json
import os
from typing import Any, Optional

from . import shares

MIB = 2**20


class LeaseTooSmall(RuntimeError):
    """The framework's context and libraries alone would fill the lease, or what is left of it."""


TITLES = {
    "tensorflow": "TensorFlow",
    "torch": "PyTorch",
    "jax": "JAX",
    "cupy": "CuPy",
    "rmm": "RMM",
    "onnxruntime": "ONNX Runtime",
}


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
        self._advised: dict[str, str] = fields["advised"]
        """The smallest leases, rounded up and formatted."""
        self.job: str = fields["job"]
        self.daemon: str = fields["daemon"]
        """The socket on which the daemon takes memory reports; "" for none."""
        self._ledger: str = fields["ledger"]
        """The file by which the processes of the job share the lease; "" for none."""
        self._ranks: "dict[str, str | None]" = fields["ranks"]
        """Variables with the number of ranks, and what they were before the job."""
        self._taken: "set[str]" = set()
        self.lifted = False
        """It was released and limits nothing any more."""

    def lift(self) -> None:
        """Limit nothing from now on."""
        self.lifted = True
        for framework in self._taken:
            self._shares().release(framework)

    def take(
        self,
        framework: str,
        gpu: "dict[str, Any]",
        wanted: Optional[int] = None,
        lower: Optional[shares.Lower] = None,
    ) -> int:
        """Take a pool for `framework` on a GPU of `gpus`, and return its size in bytes.

        Call this before the framework creates the pool, and limit the pool to the result. `wanted`
        is what the script asks for; None for as much as possible. A framework that has a pool keeps
        it. If the limit of the pool can be lowered while it is used, give `lower`, which does that:
        then it makes room for other processes.

        Raises:
            LeaseTooSmall: other frameworks and processes have taken the lease.
        """
        most = self.most(framework, gpu)
        least = shares.SMALLEST if wanted is None else min(wanted, shares.SMALLEST)
        self._taken.add(framework)
        try:
            return self._shares().take(
                self._place(gpu),
                framework,
                (least, most if wanted is None else min(wanted, most)),
                self.overhead(framework, gpu),
                lower,
            )
        except shares.NothingLeft as error:
            raise LeaseTooSmall(self._refusal(framework, gpu, error)) from None

    def resize(self, framework: str, gpu: "dict[str, Any]", wanted: int) -> int:
        """Change a pool that was taken to `wanted` bytes, or what is free; return its size."""
        wanted = min(wanted, self.most(framework, gpu))
        return self._shares().resize(self._place(gpu).place, framework, wanted)

    def most(self, framework: str, gpu: "dict[str, Any]") -> int:
        """Return the size of the largest pool that `framework` may take on a GPU."""
        part = self._place(gpu).part - self.overhead(framework, gpu)
        return max(0, min(gpu["pools"][framework], part))

    def release(self, framework: str) -> None:
        """Give back the pools of `framework`, which were not created."""
        self._shares().release(framework)

    def overhead(self, framework: str, gpu: "dict[str, Any]") -> int:
        """Return the bytes of `framework` on a GPU beside its pool."""
        return int(gpu["outside"][framework])

    def processes(self) -> int:
        """Return the number of processes that share each GPU, 1 if it is not known."""
        count = self.options["processes"] or self._count_of_ranks()
        return max(1, -(-count // len(self.gpus)))

    def _count_of_ranks(self) -> int:
        for name, before in self._ranks.items():
            value = os.environ.get(name, "")
            digits = value.partition("(")[0]  # Slurm appends a number of nodes
            if digits.isdecimal() and len(digits) < 10 and value != before:
                return int(digits)
        return 1

    def _place(self, gpu: "dict[str, Any]") -> shares.Place:
        return shares.Place(gpu["place"], gpu["whole"], self.processes())

    def _shares(self) -> shares.Shares:
        return shares.of(self.job, self._ledger)

    def _refusal(self, framework: str, gpu: "dict[str, Any]", error: shares.NothingLeft) -> str:
        title, place = TITLES.get(framework, framework), self._place(gpu)
        if error.needed > place.part:
            return (
                "cannot run {}: it needs {}; each of {} processes has {} of a lease of {}\n\n"
                "hint: ask for --mem {}, or for fewer processes".format(
                    title,
                    size(error.needed),
                    self.processes(),
                    size(place.part),
                    size(place.capacity),
                    size(error.needed * self.processes()),
                )
            )
        holders = [
            "%s has %s" % (TITLES.get(name, name), size(taken)) for name, taken in error.holders
        ]
        return (
            "cannot run {}: it needs {} on GPU {}, and {} of the lease of {} is free: {}\n\n"
            "hint: divide the lease: gpulease run --processes {}".format(
                title,
                size(error.needed),
                gpu["index"],
                size(error.left),
                size(place.capacity),
                ", ".join(holders),
                max(self.processes(), len(holders)) + 1,
            )
        )

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
        """Return the size of the pool that `framework` has taken on a GPU, or the largest."""
        held = self._shares().held(self._place(gpu).place, framework)
        return self.most(framework, gpu) if held is None else held

    def check(self, framework: str, title: str) -> None:
        """Refuse a lease that leaves `framework` no usable pool.

        Raises:
            LeaseTooSmall: with the smallest lease that is large enough.
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
                self._advised[framework],
            )
        )


def size(amount: int) -> str:
    """Format bytes as users write them: 4G, 512M."""
    gib, rest = divmod(amount, 1024 * MIB)
    return "%dG" % gib if not rest else "%dM" % -(-amount // MIB)
