"""What the command, the web page and the daemon share: limits of requests, encodings, wording,
and what counts as memory that is used without a lease.

The command imports this at every start.
"""

from __future__ import annotations

import os

from gpulease.units import format_size

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Protocol

    from gpulease.wire.jobs import ClaimView, JobView, LeaseView
    from gpulease.wire.machine import GpuView, ProcessView, StatusView
    from gpulease.wire.usage import PastJobView

    class _MayHaveEnded(Protocol):
        @property
        def outcome(self) -> str | None: ...

        @property
        def exit_status(self) -> int | None: ...


USER_COLOURS = (
    *("#6280e7", "#6d230d", "#79a135", "#5d156e"),
    *("#26a4a9", "#8a5a79", "#74610b", "#3b51b1"),
)
"""Of users in charts and bars; style.css and `cli.tables` have the same hues in this order.

They differ in lightness as well, so that any two are apart for people who see no red or no green.
"""

API_PREFIX = "/v1"

# Limits that both the command and the daemon check.
LARGEST_REQUEST = 6 * 1024 * 1024
"""Bytes of a body: LARGEST_EXEC in JSON, where a byte above 127 takes two."""
LARGEST_EXEC = 2 * 1024 * 1024
"""Bytes of arguments and environment: a quarter of the usual stack limit, execve(2)."""
LARGEST_STRING = 128 * 1024
"""Bytes of one argument or variable with its NUL: MAX_ARG_STRLEN of execve(2)."""
LONGEST_NAME = 128
"""Characters of the name of a job."""
MOST_ELEMENTS = 10_000
"""Jobs in one array."""
LARGEST_INDEX = 999_999
"""Of an element of an array."""
MOST_DEPENDENCIES = 100
"""Jobs that one job names in --after; an array counts as one."""
LARGEST_RETRY = 4.0
"""Factor of memory for the next attempt of a job."""
_POINTER = 8
_MAKERS = frozenset({"NVIDIA", "Tesla", "GeForce", "Generation"})
_GIB = 1 << 30
_MOST_RANGES = 4
"""Of the indices in a row."""


def exec_size(argv: Sequence[str], environment: Mapping[str, str]) -> int:
    """Return how many bytes execve(2) counts for arguments and environment."""
    strings = [*argv, *(f"{name}={value}" for name, value in environment.items())]
    return sum(len(os.fsencode(each)) + 1 + _POINTER for each in strings) + 2 * _POINTER


def to_wire(text: str) -> str:
    """Return a string of the operating system as one character per byte."""
    return os.fsencode(text).decode("latin-1")


def from_wire(text: str) -> str:
    """Return the operating system's string for `text`; the inverse of `to_wire`.

    Raises:
        UnicodeEncodeError: `text` holds a character that is not a byte.
    """
    return os.fsdecode(text.encode("latin-1"))


def spoken(name: str) -> str:
    """Return a name such as time_limit as people read and type it: time-limit."""
    return name.replace("_", "-")


def ending(job: JobView | PastJobView) -> str:
    """Write how a job ended, in a few words."""
    return "out of GPU memory" if job.out_of_memory else spoken(job.outcome or "ended")


_ASKED_FOR = frozenset({"released", "cancelled", "preempted", "requeued"})
"""The ends that somebody asked for."""


def has_failed(job: _MayHaveEnded) -> bool:
    """Return whether a job ended without success, and nobody asked for that."""
    succeeded = job.outcome == "exited" and job.exit_status == 0
    return job.outcome is not None and job.outcome not in _ASKED_FOR and not succeeded


def runs(numbers: Sequence[int]) -> list[list[int]]:
    """Return the first and the last number of each run of ascending numbers without gaps."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return found


def ranges(numbers: Sequence[int]) -> str:
    """Write ascending numbers as ranges: 0-3,7,9-10; of many ranges only the first."""
    found = runs(numbers)
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in found]
    return ",".join([*shown[:_MOST_RANGES], *["..."] * (len(shown) > _MOST_RANGES)])


def name_of_row(names: Sequence[str]) -> str:
    """Return the words with which all names begin: those of a grid end with different values."""
    shared = os.path.commonprefix([f"{each} " for each in names])  # noqa: RUF071 -- no paths
    return shared.rpartition(" ")[0] or names[0]


def clean(text: str) -> str:
    """Return text without characters that control a terminal or turn text around, on one line."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else "?" for char in text)


def terminal_lines(output: str) -> list[str]:
    """Return the lines of an output as a terminal would leave them: no colours, a bar once."""
    import re  # for few verbs

    # Sequences for a terminal (ECMA-48): colours, movements of the cursor, titles of windows.
    escapes = r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|.)?"
    plain = re.sub(escapes, "", output).expandtabs()
    lines = [line.rstrip().rpartition("\r")[2] for line in plain.split("\n")]
    return ["".join(char if char.isprintable() else " " for char in line) for line in lines]


def model(name: str, total: int | None) -> str:
    """Write the model of a GPU, with its memory: A100-SXM4 80G."""
    words = [word for word in clean(name).split() if word not in _MAKERS]
    if not total:
        return " ".join(words)
    memory = f"{round(total / _GIB)}G" if total >= _GIB else format_size(total)
    text = " ".join(words).removesuffix(f"{memory}B").rstrip("- ")
    return text if text.endswith(memory) else f"{text} {memory}"


def shown_command(command: str) -> str:
    """Write a command without the paths of the interpreter and the script: digits.py --batch 16.

    What a shell would have to quote is left as it is.
    """
    program, _, rest = clean(command).partition(" ")
    name = program.rpartition("/")[2]
    is_script = rest[:1] not in ("", "-", "'")
    if name.startswith("python") and not name.strip("python.0123456789") and is_script:
        program, _, rest = rest.partition(" ")
        name = program.rpartition("/")[2]
    return f"{name or program} {rest}".rstrip() if "'" not in program else clean(command)


def ordinal(number: int) -> str:
    """Write a place in the queue: 1st, 2nd, 3rd, 4th, 11th."""
    teens = 10 < number % 100 < 20
    ending = "th" if teens else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def claimed(claim: ClaimView) -> str:
    """Write a claim: 4G, 4G..10G, 2 x 40%, 4G exclusive, 4G on GPU 1; 4G, ram 32G, cpus 8."""
    amount = _size_or_share(claim.memory, claim.share)
    if claim.memory_bound is not None or claim.share_bound is not None:
        amount += f"..{_size_or_share(claim.memory_bound, claim.share_bound)}"
    times = f"{claim.gpus} x {amount}" if claim.gpus > 1 else amount
    times = f"{times} exclusive" if claim.exclusive else times
    which = [_named(claim), clean(claim.model) if claim.model else None]
    # A size such as 23.9G is no whole number of bytes, and was cut off.
    which += [f"{format_size(claim.min_vram + 1)} or more" if claim.min_vram else None]
    which += ["one model" if claim.same_model else None]
    which += ["linked GPUs" if claim.linked and claim.gpus > 1 else None]
    wanted = ", ".join(each for each in which if each)
    asked = f"{times} on {wanted}" if wanted else times
    ram = "" if claim.ram is None else f", ram {format_size(claim.ram)}"
    return f"{asked}{ram}" + ("" if claim.cpus is None else f", cpus {claim.cpus}")


def _size_or_share(size: int | None, share: float | None) -> str:
    if share is not None:
        return f"{share:g}%"
    return "?" if size is None else format_size(size)


def leased(lease: LeaseView) -> str:
    """Write the size of a lease: 4G, or 4G..10G with a bound."""
    bound = "" if lease.memory_bound is None else f"..{format_size(lease.memory_bound)}"
    return f"{format_size(lease.memory)}{bound}"


def most_of(lease: LeaseView) -> int:
    """Return the bytes that a job may use of a GPU while no other job needs them."""
    return lease.memory if lease.memory_bound is None else lease.memory_bound


def _named(claim: ClaimView) -> str | None:
    """Write the GPUs that a claim names; a job may get any of those that are too many."""
    if not claim.named:
        return None
    labels = [clean(each) for each in claim.named_labels or claim.named]
    if len(labels) == claim.gpus:
        return f"GPU {labels[0]}" if len(labels) == 1 else f"GPUs {', '.join(labels)}"
    return f"{'GPU' if claim.gpus == 1 else 'GPUs'} {', '.join(labels[:-1])} or {labels[-1]}"


def on_gpus(amount: str, count: int) -> str:
    """Write what a lease has on each of its GPUs."""
    return f"{amount} on {'1 GPU' if count == 1 else f'each of {count} GPUs'}"


def user_colour(user: str) -> int:
    """Return the number of a user's colour: of the name alone, so that it is the same everywhere.

    Two users may have one colour. Their names, and how the second is drawn, tell them apart.
    """
    from binascii import crc32

    return crc32(user.encode(errors="replace")) % len(USER_COLOURS)


def free_of(gpu: GpuView) -> int | None:
    """Return what can be leased now; None if that is not known."""
    if gpu.state in ("unreadable", "lost"):
        return None
    # Of a GPU that grants nothing, nothing can be leased.
    return gpu.memory.headroom if gpu.state == "available" else 0


_MIB = 1 << 20
_OF_DRIVER = 256 * _MIB
"""Idle cards report 1 to 27 MiB, some about 100, with no process on them."""
_OF_DRIVER_SHARE = 100
"""Of a card above 25 GiB, a hundredth: the driver holds more on larger ones."""


def used_without_lease(gpu: GpuView, view: StatusView) -> int:
    """Return the bytes on a GPU without a lease that people should know of.

    Without a process in the list, a little memory is what the driver holds for itself.
    """
    unmanaged = gpu.memory.unmanaged or 0
    if any(unmanaged_processes(gpu, view, gone=True)):
        return unmanaged
    return beyond_driver(unmanaged, gpu.memory.total)


def most_of_driver(total: int | None) -> int:
    """Return the most bytes of a GPU that the driver alone holds: 256 MiB, or 1 % if more."""
    return max(_OF_DRIVER, (total or 0) // _OF_DRIVER_SHARE)


def beyond_driver(unmanaged: int | None, total: int | None) -> int:
    """Return memory that no process explains; 0 if it is the driver's."""
    return 0 if unmanaged is None or unmanaged <= most_of_driver(total) else unmanaged


def unmanaged_processes(
    gpu: GpuView, view: StatusView, *, gone: bool = False
) -> Iterator[ProcessView]:
    """Yield the processes on a GPU that have no lease on it.

    For a moment after the end of a job, the driver lists its processes, which are `gone`.
    """
    if not gpu.processes:
        return
    # A GPU that MIG divides lists the processes of its MIG devices.
    of_gpu = {gpu.uuid, *(each.uuid for each in view.gpus if each.parent == gpu.uuid)}
    leased = {job.id for job in view.jobs for lease in job.leases if lease.gpu in of_gpu}
    for process in gpu.processes:
        if process.job in leased or (process.serves and gpu.memory.leased):
            continue
        if gone or process.job is None or process.user is not None:
            yield process
