"""Interprets a value of CUDA_VISIBLE_DEVICES as a choice among the leased GPUs.

The rules are those of the CUDA driver (programming guide, "CUDA Environment Variables"): entries
are indices or UUIDs; a UUID may be a unique prefix; the first invalid entry ends the list; a GPU
listed twice makes no GPU visible.
"""

import json
from typing import Optional

NONE = "-1"


def inside(value: "str | None", raw: str) -> str:
    """Return `value` limited to the lease `raw`; None, for an unset variable, means all of it."""
    fields = json.loads(raw)
    if value is None:
        return str(fields["visible"])
    leased = fields["visible"].split(",")
    uuids = [gpu["uuid"] for gpu in fields["gpus"]]
    return choose(value, leased, uuids)


def choose(value: str, leased: "list[str]", uuids: "list[str]") -> str:
    """Return the entries of `leased` that `value` names; `uuids` are theirs, in the same order."""
    entries = [entry.strip() for entry in value.split(",")]
    # A script that splits the variable it was given must get the entries it took, even where they
    # are numbers. Any other number counts the leased GPUs from 0.
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


def _named(entry: str, leased: "list[str]", uuids: "list[str]") -> Optional[str]:
    if entry.isdecimal():
        return leased[int(entry)] if int(entry) < len(leased) else None
    pairs = zip(leased, uuids)
    matching = [name for name, uuid in pairs if entry and uuid.startswith(entry)]
    return matching[0] if len(matching) == 1 else None
