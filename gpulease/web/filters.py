"""Filters of listings, as the address of a page has them, and what a search names. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import get_args
from urllib.parse import quote, urlencode

from gpulease.drawing.words import index_of
from gpulease.wire.jobs import JobView, Outcome
from gpulease.wire.machine import GpuView
from gpulease.wire.text import LONGEST_NAME, spoken

ENDS = (
    ("", "any"), ("failed", "failed"), *((each, spoken(each)) for each in get_args(Outcome)),
)  # fmt: skip
"""How jobs end, as the daemon names it and as people read it."""

_JOB = re.compile(r"(?:job\s+)?#?(\d{1,19}(?:_\d+)?)", re.IGNORECASE | re.ASCII)
_GPU = re.compile(r"gpu\s*#?(\d+(?::\d+)?)", re.IGNORECASE | re.ASCII)
_SHORTEST_UUID = len("GPU-1234")
"""Of the beginning of a UUID by which a GPU is found."""


@dataclass(frozen=True, slots=True)
class Filter:
    """An empty text matches all."""

    user: str = ""
    state: str = ""
    """Running or waiting."""
    gpu: str = ""
    """Its index, as people see it."""
    name: str = ""
    """A part of the name, in any case."""
    end: str = ""
    """One of ENDS."""

    @property
    def is_set(self) -> bool:
        """Whether some jobs are left out."""
        return any((self.user, self.state, self.gpu, self.name, self.end))

    def query(self, **changed: object) -> str:
        """Return the query of an address, with its question mark, for this filter but `changed`."""
        asked = asdict(self) | changed
        text = urlencode({name: value for name, value in asked.items() if value}, errors="replace")
        return f"?{text}"

    def matches(self, job: JobView, gpus: Sequence[GpuView]) -> bool:
        """Return whether a job that waits or holds memory is shown."""
        label_of = {gpu.uuid: index_of(gpu) for gpu in gpus}
        is_there = any(label_of.get(lease.gpu) == self.gpu for lease in job.leases)
        return (
            self.user in ("", job.user)
            and (not self.gpu or is_there)
            and self.name.lower() in job.name.lower()
            and self.state != ("running" if job.state == "queued" else "waiting")
        )

    @property
    def pattern(self) -> str | None:
        """The shell pattern of the names; None for any."""
        if not self.name:
            return None
        plain = "".join(f"[{char}]" if char in "*?[" else char for char in self.name)
        return f"*{plain}*"


def filter_of(asked: Mapping[str, str]) -> Filter:
    """Read the filter of an address; what is too long or unknown is left out."""
    found = {name: asked.get(name, "")[:LONGEST_NAME] for name in ("user", "gpu", "name")}
    state, end = asked.get("state", ""), asked.get("end", "")
    return Filter(
        **found,
        state=state if state in ("running", "waiting") else "",
        end=end if end in dict(ENDS) else "",
    )


def page_named(asked: str, gpus: Sequence[GpuView]) -> str:
    """Return the page of the job or GPU that a search names; empty if it may be another name.

    A number that no job or GPU has leads to a page that says so.
    """
    if found := _JOB.fullmatch(asked):
        return f"jobs/{found[1]}"
    if found := _GPU.fullmatch(asked):
        return f"gpus/{found[1]}"
    begins = any(each.uuid.lower().startswith(asked.lower()) for each in gpus)
    return f"gpus/{quote(asked)}" if begins and len(asked) >= _SHORTEST_UUID else ""
