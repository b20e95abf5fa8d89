"""Interprets a value of CUDA_VISIBLE_DEVICES as a choice among the leased GPUs.

The syntax is that of the CUDA driver (programming guide, "CUDA Environment Variables"): entries
are indices or UUIDs; a UUID may be a unique prefix; the first invalid entry ends the list; a GPU
listed twice makes no GPU visible.

Numbers count the leased GPUs from 0. A script written for the whole machine has other numbers. They
are mapped if their meaning is plain: they are the machine's numbers of leased GPUs, or there are as
many of them as leased GPUs. docs/frameworks.md has the rules as a table. They also hold for the
numbers in TensorFlow's visible_device_list.
"""

import json
import sys
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

NAME = "CUDA_VISIBLE_DEVICES"
NONE = "-1"
_NO_GPU_ON_PURPOSE = ("", NONE, "none", "nodevfiles")
"""The last one is what Slurm sets for a job without GPUs."""
_MOST_SHOWN = 100
_DIGITS = 10
"""Numbers of GPUs have fewer, and int() refuses thousands of them."""
_noticed: "Set[str]" = set()
"""Values and texts that this process was notified of."""

Notify = Callable[[str, bool], None]
"""Takes a text about a value, and whether the job sees all the GPUs that the value stands for."""
Gpus = List[Dict[str, Any]]


def inside(value: "Optional[str]", raw: str, notify: "Optional[Notify]" = None) -> str:
    """Return `value` limited to the lease `raw`; None, for an unset variable, means all of it.

    Calls `notify` once for each value that names a GPU outside the lease.
    """
    fields = json.loads(raw)
    if value is None:
        return str(fields["visible"])
    if value.strip().lower() in _NO_GPU_ON_PURPOSE:
        return value if value in ("", NONE) else NONE
    chosen, text, is_complete = choose(value, fields["visible"].split(","), fields["gpus"])
    if text is not None and notify is not None and value not in _noticed:
        _noticed.add(value)
        notify(text, is_complete)
    return chosen


def choose(value: str, leased: "List[str]", gpus: Gpus) -> "Tuple[str, Optional[str], bool]":
    """Return the entries of `leased` that `value` names, and a text if it names others.

    `gpus` are the leased ones, in the same order. The last result is whether no entry was lost.
    """
    entries = [entry.strip() for entry in value.rstrip(", ").split(",")]
    places, is_mapped = _places(entries, leased, gpus)
    kept = _valid(places)
    names = ",".join(leased[place] for place in kept) or NONE
    if len(kept) < len(entries):
        return names, _lost(value, places, kept, gpus), False
    return names, _mapped(value, kept, gpus) if is_mapped else None, True


def read_list(value: str, gpus: Gpus) -> str:
    """Return a visible_device_list of TensorFlow as numbers of `gpus`, which the process sees.

    Writes a line for each value that names other GPUs. TensorFlow refuses a number of no GPU.
    """
    entries = [entry.strip() for entry in value.split(",") if entry.strip()]
    if not entries:
        return value
    name = "visible_device_list"
    places, is_mapped = _places(entries, [], gpus)
    kept = _valid(places)
    if len(kept) < len(entries):
        say("{} {}".format(_shown(value, name), _outside(places, kept, gpus)))
        return value
    if is_mapped:
        say(_mapped(value, kept, gpus, name))
    return ",".join(map(str, kept))


def say(text: str) -> None:
    """Write a line for the user, once in this process."""
    if text in _noticed:
        return
    _noticed.add(text)
    try:
        sys.stderr.write("gpulease: {}\n".format(text))
        sys.stderr.flush()
    except Exception:  # noqa: BLE001  (there is no stderr)
        return


def _places(
    entries: "List[str]", leased: "List[str]", gpus: Gpus
) -> "Tuple[List[Optional[int]], bool]":
    """Return the place in the lease of each entry, None for none, and whether they were mapped."""
    # A script that splits the variable it was given must get the entries it took, even where they
    # are numbers.
    if all(entry in leased for entry in entries):
        return [leased.index(entry) for entry in entries], False
    if not all(_is_number(entry) for entry in entries):
        return [_place(entry, gpus) for entry in entries], False
    numbers, count = [int(entry) for entry in entries], len(gpus)
    indices = [gpu.get("index") for gpu in gpus]
    are_of_machine = all(indices.count(number) == 1 for number in numbers)
    if any(number >= count for number in numbers):
        if are_of_machine:
            return [indices.index(number) for number in numbers], True
        if len(set(numbers)) == len(numbers) == count:
            return list(range(count)), True
    # Numbers with two meanings count the leased GPUs, and the job is notified.
    means_others = are_of_machine and any(indices[number] != number for number in numbers)
    return [number if number < count else None for number in numbers], means_others


def _is_number(entry: str) -> bool:
    return entry.isdecimal() and len(entry) < _DIGITS


def _place(entry: str, gpus: Gpus) -> "Optional[int]":
    if _is_number(entry):
        return int(entry) if int(entry) < len(gpus) else None
    matching = [place for place, gpu in enumerate(gpus) if entry and gpu["uuid"].startswith(entry)]
    return matching[0] if len(matching) == 1 else None


def _valid(places: "List[Optional[int]]") -> "List[int]":
    """Return the places that CUDA would use."""
    kept: "List[int]" = []
    for place in places:
        if place is None:
            break
        kept.append(place)
    return kept if len(set(kept)) == len(kept) else []


def _mapped(value: str, kept: "List[int]", gpus: Gpus, name: str = NAME) -> str:
    return "{} is read as {} of the job, {} of the machine".format(
        _shown(value, name), _numbered(kept), _numbered([gpus[place]["index"] for place in kept])
    )


def _lost(value: str, places: "List[Optional[int]]", kept: "List[int]", gpus: Gpus) -> str:
    sees = "only {}".format(_numbered(kept)) if kept else "no GPU"
    why = _outside(places, kept, gpus).replace(";", ": this process sees {};".format(sees))
    return "{} {}".format(_shown(value), why)


def _outside(places: "List[Optional[int]]", kept: "List[int]", gpus: Gpus) -> str:
    why = "names a GPU twice"
    if None in places:
        why = "is {}outside the lease".format("partly " if kept else "")
    return "{}; the job has {}".format(why, numbered(gpus))


def numbered(gpus: Gpus) -> str:
    """Return the numbers of `gpus` as people read them: GPU 0, GPUs 0,1."""
    return _numbered(list(range(len(gpus))))


def _shown(value: str, name: str = NAME) -> str:
    text = value if value.isprintable() else repr(value)
    return "{}={}".format(name, text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "...")


def _numbered(numbers: "List[int]") -> str:
    noun = "GPU" if len(numbers) == 1 else "GPUs"
    return "{} {}".format(noun, ",".join(map(str, numbers)))
