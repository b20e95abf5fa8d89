"""Input that nobody would think of: few examples, always the same, unless more are asked for.

GPULEASE_FUZZ=20 (`make fuzz`) tries twenty times as many, and others at each run.
"""

import os
from typing import Any

from hypothesis import HealthCheck, Phase, settings

_TIMES = int(os.environ.get("GPULEASE_FUZZ", "1"))


def examples(count: int, **changes: Any) -> settings:
    """Return how to try so many examples; as many times more as GPULEASE_FUZZ says."""
    return settings(
        max_examples=count * _TIMES,
        derandomize=_TIMES == 1,
        deadline=None,
        database=None,
        # A failure is shown as small as it can be made, without long thought about its causes.
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        **changes,
    )
