"""Read what a script writes to CUDA_VISIBLE_DEVICES as a choice among the leased GPUs.

The rules are the CUDA driver's own (programming guide, "CUDA Environment Variables"): entries are
numbers or UUIDs, a UUID may be cut short if it stays unique, the first entry that names nothing
ends the list, and a GPU named twice means none at all.
"""

from __future__ import annotations

import json
from typing import Optional

NONE = "-1"


def inside(value: str | None, raw: str) -> str:
    """Return `value` in terms of the lease `raw`; None, for a variable unset, is all of it."""
    fields = json.loads(raw)
    if value is None:
        return str(fields["visible"])
    leased = fields["visible"].split(",")
    uuids = [gpu["uuid"] for gpu in fields["gpus"]]
    return choose(value, leased, uuids)


def choose(value: str, leased: list[str], uuids: list[str]) -> str:
    """Return the entries of `leased` that `value` means; `uuids` are theirs, in the same order."""
    entries = [entry.strip() for entry in value.split(",")]
    # A script that cuts up the variable it was given must get what it cut out, even where that
    # is a number; any other number counts the leased GPUs from 0.
    verbatim = all(entry in leased for entry in entries)
    chosen: list[str] = []
    for entry in entries:
        found = entry if verbatim else _named(entry, leased, uuids)
        if found is None:
            break
        chosen.append(found)
    if not chosen or len(set(chosen)) < len(chosen):
        return NONE
    return ",".join(chosen)


def _named(entry: str, leased: list[str], uuids: list[str]) -> Optional[str]:
    if entry.isdecimal():
        return leased[int(entry)] if int(entry) < len(leased) else None
    pairs = zip(leased, uuids)  # noqa: B905  (no strict= before Python 3.10)
    fitting = [place for place, uuid in pairs if entry and uuid.startswith(entry)]
    return fitting[0] if len(fitting) == 1 else None
