"""What is submitted: honest jobs, which hold at most their lease and end by themselves."""

import random
from dataclasses import dataclass
from pathlib import Path

from gpulease.wire.requests import ClaimRequest, SubmitRequest

G = 1 << 30
HELD = "CHAOS_HELD"
_BEGIN = """
printf 'start\\n' >>"$0"
hold() {
    IFS=,; for gpu in $CUDA_VISIBLE_DEVICES; do echo "$1" >"$CHAOS_HELD/$gpu/$$"; done; unset IFS
}
"""
_END = """
IFS=,; for gpu in $CUDA_VISIBLE_DEVICES; do rm -f "$CHAOS_HELD/$gpu/$$"; done; unset IFS
"""


@dataclass
class Honest:
    """One job, and how it ends unless somebody stops it."""

    mark: str
    kind: str
    ledger: Path
    script: str
    code: int
    memory: int
    gpus: int = 1
    exclusive: bool = False
    number: int | None = None

    def request(self, held: Path) -> SubmitRequest:
        """Return what is sent."""
        return SubmitRequest(
            ["sh", "-c", self.script, str(self.ledger)],
            "/",
            {"PATH": "/usr/bin:/bin", HELD: str(held)},
            claim=ClaimRequest(memory=self.memory, gpus=self.gpus, exclusive=self.exclusive),
            name=self.mark,
        )


def any_job(folder: Path, number: int, rng: random.Random) -> Honest:
    """Return a job of a kind that chance picks."""
    mark = f"chaos-{number}"
    memory = rng.choice((1, 2, 2, 4, 6, 10, 16)) * G
    kind = rng.choice(tuple(_SCRIPTS))
    code = rng.choice((0, 0, 0, 1, 3, 42))
    body = _SCRIPTS[kind](memory, rng)
    script = f"{_BEGIN}{body}{_END}printf 'end\\n' >>\"$0\"; exit {code}"
    return Honest(
        mark, kind, folder / mark, script, code, memory,
        gpus=2 if rng.random() < 0.08 else 1, exclusive=rng.random() < 0.05,
    )  # fmt: skip


def _holds(memory: int, rng: random.Random) -> str:
    return f"hold {_part(memory, rng)}; sleep {rng.uniform(0.1, 1.5):.2f}"


def _grows(memory: int, rng: random.Random) -> str:
    return (
        f"hold {memory // 4}; sleep {rng.uniform(0.1, 0.6):.2f}; "
        f"hold {memory}; sleep {rng.uniform(0.1, 0.8):.2f}"
    )


def _family(memory: int, rng: random.Random) -> str:
    """Return a script whose child holds a half."""
    half = memory // 2
    child = (
        f'for gpu in $(echo "$CUDA_VISIBLE_DEVICES" | tr , " "); do '
        f'echo {half} >"$CHAOS_HELD/$gpu/$$"; done; sleep {rng.uniform(0.1, 1):.2f}; '
        f'for gpu in $(echo "$CUDA_VISIBLE_DEVICES" | tr , " "); do '
        f'rm -f "$CHAOS_HELD/$gpu/$$"; done'
    )
    return f"hold {half}\nsh -c '{child}' &\nsleep {rng.uniform(0.1, 1):.2f}; wait"


def _idle(_: int, rng: random.Random) -> str:
    return f"sleep {rng.uniform(0, 0.8):.2f}"


def _part(memory: int, rng: random.Random) -> int:
    return int(memory * rng.choice((0.3, 0.7, 1.0)))


_SCRIPTS = {"holds": _holds, "grows": _grows, "family": _family, "idle": _idle}
