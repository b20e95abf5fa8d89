"""Reads what `scontrol --oneliner show` prints: records of `Key=Value`, separated by spaces.

Values may contain spaces, and users choose some of them: the name of a job may look like another
field. Of a field that occurs twice, the first counts; where it matters, callers ask for fields that
no user can write.
"""

import re
from collections.abc import Mapping

_FIELD = re.compile(r"(?:^| )([A-Z][A-Za-z:/_]*)=")


def parse_records(text: str) -> list[Mapping[str, str]]:
    """Return the fields of each line; "(null)" and "N/A" are left out."""
    return [parse_record(line) for line in text.splitlines() if line.strip()]


def parse_record(line: str) -> Mapping[str, str]:
    """Return the fields of one line."""
    found = list(_FIELD.finditer(line))
    ends = [*(each.start() for each in found[1:]), len(line)]
    record: dict[str, str] = {}
    for field, end in zip(found, ends, strict=True):
        value = line[field.end() : end].strip()
        if value not in ("(null)", "N/A"):
            record.setdefault(field[1], value)
    return record
