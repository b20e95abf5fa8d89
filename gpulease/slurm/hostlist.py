"""Slurm's lists of nodes: "n[1-3,07],login" (`scontrol show hostnames` expands them)."""

import re

_ITEM = re.compile(r"(?:[^,\[\]]|\[[^\]]*\])+")
_PART = re.compile(r"\[([^\]]*)\]|[^\[\]]+")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


def includes(hostlist: str, node: str) -> bool:
    """Return whether a list names a node. The list is not expanded: it may be huge."""
    return any(_matches(item, node) for item in _ITEM.findall(hostlist))


def _matches(item: str, node: str) -> bool:
    parts = list(_PART.finditer(item))
    pattern = "".join(
        r"([0-9]{1,18})" if part[1] is not None else re.escape(part[0]) for part in parts
    )
    found = re.fullmatch(pattern, node)
    if found is None:
        return False
    ranges = (part[1] for part in parts if part[1] is not None)
    return all(
        _in_ranges(number, each) for number, each in zip(found.groups(), ranges, strict=True)
    )


def _in_ranges(number: str, ranges: str) -> bool:
    for each in ranges.split(","):
        found = _RANGE.fullmatch(each)
        if found is None:
            continue
        first, last = found[1], found[2] or found[1]
        # Numbers with leading zeros have the width of the first one.
        width = len(first) if first.startswith("0") else 1
        if int(first) <= int(number) <= int(last) and number == f"{int(number):0{width}d}":
            return True
    return False
