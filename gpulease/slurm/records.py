"""Reads what Slurm's commands print, and its units.

Users choose the names and comments of jobs, which may contain line breaks and look like fields of
other jobs. `squeue --Format` cuts and pads each field to a width in bytes, so its records have one
length, and no text can leave its field. `scontrol --oneliner show` prints `Key=Value`, separated by
spaces: where it matters, callers ask for records that no user can write, such as nodes.

Shards are the unit in which Slurm counts memory of GPUs (gres.conf(5), "sharding"). All shards of a
job are on one GPU. Slurm counts them and limits nothing.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

from gpulease.errors import SlurmFailed
from gpulease.record import record
from gpulease.units import MIB

_FIELD = re.compile(r"(?:^| )([A-Z][A-Za-z:/_]*)=")
_ABSENT: Final = frozenset({"(null)", "N/A", "n/a", "NONE", ""})
_NUMBER = re.compile(r"\d{1,10}(?:_\d{1,7})?", re.ASCII)
_STREAM = re.compile(r"^   (StdErr|StdOut)=(.*)$", re.MULTILINE)
_PARTS = re.compile(r"\((\d+/\d+(?:,\d+/\d+)*)\)")
DEFAULT_SHARD = 256 * MIB
"""Bytes of one shard."""
_UNITS = {"K": 1024, "M": 1024**2}
_OF_NODE = re.compile(r"(?:^|,)(gpu|shard)(?::([^:,()]*[^:,()\d][^:,()]*))?(?::(\d+))?(?=[,(]|$)")
"""Such as gpu:2, gpu:a100:2(S:0-1) or shard:192."""

_PLACEMENT = re.compile(r"^     Nodes=(\S+) CPU_IDs=\S* Mem=\d* GRES=(\S*)$", re.MULTILINE)


def ending(text: str) -> tuple[int, int] | None:
    """Return the exit code and the signal in the field exit_code of squeue; None if there is none.

    22.05 prints the status of wait(2), later releases code:signal.
    """
    code, colon, signal = text.partition(":")
    if not code.isdecimal() or (colon and not signal.isdecimal()):
        return None
    if colon:
        return int(code), int(signal)
    try:
        status = os.waitstatus_to_exitcode(int(code))
    except (ValueError, OverflowError):  # such as Slurm's NO_VAL
        return None
    return (0, -status) if status < 0 else (status, 0)


def fixed_format(widths: Mapping[str, int]) -> str:
    """Return the value of `squeue --Format` for fields of these widths, in bytes."""
    return ",".join(f"{name}:{width}" for name, width in widths.items())


def parse_fixed(text: str, widths: Mapping[str, int]) -> Iterator[Mapping[str, str]]:
    """Yield the fields of each record of `squeue --noheader --Format`; absent ones are left out.

    Raises:
        SlurmFailed: this is something else.
    """
    data = text.encode("utf-8", "surrogateescape")
    length = sum(widths.values())
    if len(data) % (length + 1) or data[length :: length + 1].strip(b"\n"):
        raise SlurmFailed(
            "cannot read the list of jobs: squeue prints fields of other widths than asked for",
            "gpulease doctor shows the versions; please report it with that of Slurm",
        )
    for begin in range(0, len(data), length + 1):
        fields, at = {}, begin
        for name, width in widths.items():
            value = data[at : at + width].decode("utf-8", "replace").strip(" ")
            at += width
            if value not in _ABSENT:
                fields[name] = value
        yield fields


def parse_records(text: str) -> list[Mapping[str, str]]:
    """Return the fields of each line; absent ones, such as "(null)", are left out."""
    return [parse_record(line) for line in text.split("\n") if line.strip()]


def parse_record(line: str) -> Mapping[str, str]:
    """Return the fields of one line. Of a field that occurs twice, the first counts."""
    found = list(_FIELD.finditer(line))
    ends = [*(each.start() for each in found[1:]), len(line)]
    fields: dict[str, str] = {}
    for field, end in zip(found, ends, strict=True):
        value = line[field.end() : end].strip()
        if value not in _ABSENT:
            fields.setdefault(field[1], value)
    return fields


def placements(shown: str) -> Mapping[str, str]:
    """Return the generic resources of a job by node, from `scontrol show job --details JOB`.

    Such as {"n1": "shard:40(IDX:1)"}, see `with_indexes`. A node that occurs twice is left out: the
    name of the job may contain such a line.
    """
    found: dict[str, str] = {}
    twice = set()
    for node, resources in _PLACEMENT.findall(shown):
        twice |= {node} & found.keys()
        found[node] = with_indexes(resources)
    return {node: resources for node, resources in found.items() if node not in twice}


def with_indexes(resources: str) -> str:
    """Return a GRES= of scontrol with the numbers of the GPUs: "shard:16(IDX:1)".

    Since Slurm 23.11, shards have what the job has of how many on each GPU of the node instead:
    "shard:16(0/96,16/96)".
    """

    def indexes(found: re.Match[str]) -> str:
        parts = found[1].split(",")
        return f"(IDX:{','.join(str(at) for at, part in enumerate(parts) if part[:2] != '0/')})"

    return _PARTS.sub(indexes, resources)


def stream_files(shown: str) -> tuple[str | None, str | None]:
    """Return the files of stdout and stderr of a job, from `scontrol show job JOB`.

    They are at its end; what the owner of the job writes before them does not count.
    """
    found = dict(_STREAM.findall(shown))
    return found.get("StdOut") or None, found.get("StdErr") or None


def is_number(word: str) -> bool:
    """Return whether a word is the id of a job as commands take it: 17, or 17_3 of an array."""
    return _NUMBER.fullmatch(word) is not None


def is_batch(flag: str) -> bool:
    """Tell from the BatchFlag of a job whether it is a batch job.

    It is 1, and 2 after Slurm has queued the job again because its node failed.
    """
    return flag.strip() not in ("", "0")


def gres_of_node(gres: str) -> Counter[tuple[str, str]]:
    """Return the counts in the Gres of a node by gpu or shard and type, in its order."""
    counts = Counter[tuple[str, str]]()
    for name, kind, count in _OF_NODE.findall(gres):
        counts[name, kind] += int(count or 1)
    return counts


@record(frozen=True)
class Requested:
    """The GPUs that a job asks for on each node: whole ones, or shards of one."""

    gpus: int = 0
    shards: int = 0

    def __bool__(self) -> bool:
        return bool(self.gpus or self.shards)


def requested(*resources: str | None) -> Requested:
    """Read generic resources, such as "gres:shard:16", "gres/gpu:a100:2", "gres/gpu=1" or "gpu"."""
    counts = {"gpu": 0, "shard": 0}
    for each in ",".join(filter(None, resources)).split(","):
        plain = each.partition("(")[0].replace("/", ":").replace("=", ":")
        name, *rest = plain.removeprefix("gres:").split(":")
        if name in counts:
            counts[name] += _count(rest[-1] if rest else "")
    return Requested(counts["gpu"], counts["shard"])


def _count(text: str) -> int:
    """Return a count, such as 16 or 1K; 1 for the type of a GPU without a count."""
    number, unit = (text[:-1], text[-1:].upper()) if text[-1:].isalpha() else (text, "")
    if not (number.isascii() and number.isdecimal()):
        return 1
    return int(number) * _UNITS.get(unit, 1)
