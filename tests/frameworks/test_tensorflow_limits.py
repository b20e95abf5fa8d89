"""What a real TensorFlow is handed inside a lease, by what the script does and by version.

No GPU is needed: tensorflow_zygote.py fakes the list of devices and reads the configuration where
it leaves Python. Each scenario is a test of its own; all of one version share one import.
"""

from functools import cache

import pytest

from frameworks.environments import versions
from frameworks.tensorflow_leases import HERE, Outcome, Outcomes, handed
from frameworks.tensorflow_scenarios import ROWS, TOO_SMALL, Row
from goldens import mentions

pytestmark = pytest.mark.tensorflow

# The names vary faster, so that parallel workers import few versions each.
in_each_version = pytest.mark.parametrize(
    "version", versions("1.13", "1.14", "1.15", "2.4", "2.12", "2.19", "2.20", HERE)
)


@cache
def outcomes(version: str) -> Outcomes:
    return handed(
        version, {name: (row.source, row.lease) for name, row in (ROWS | TOO_SMALL).items()}
    )


def outcome_of(name: str, row: Row, version: str) -> Outcome:
    every = outcomes(version)
    if misfit := row.misfit(every.release):
        pytest.skip(misfit)
    return every.of[name]


@pytest.mark.parametrize("name", ROWS, ids=str)
@in_each_version
def test_tensorflow_is_handed_the_lease(name: str, version: str) -> None:
    row = ROWS[name]

    outcome = outcome_of(name, row, version)

    assert outcome["error"] is None
    last = outcome["sent"][-1]
    assert {part: last[part] for part in row.sent} == row.sent
    assert outcome["seen"] == row.seen


@pytest.mark.parametrize("name", TOO_SMALL, ids=str)
@in_each_version
def test_a_lease_too_small_for_tensorflow_says_what_would_do(name: str, version: str) -> None:
    outcome = outcome_of(name, TOO_SMALL[name], version)

    message, _, hint = outcome["error"].partition("\n\n")
    assert mentions(message, "LeaseTooSmall: ", "TensorFlow", "512M")
    assert mentions(hint, "hint: ", "--mem 2G")
    assert outcome["sent"] == []
