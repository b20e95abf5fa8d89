"""`python -m chaos [--rounds N] [--seed N]`: exits 1 where a promise was not kept."""

import argparse
import secrets
import sys
import tempfile
from collections import Counter
from pathlib import Path

from chaos.rounds import Plan, run
from chaos.verdict import Tally, table


def main() -> int:
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="each with a seed of its own")
    parser.add_argument("--seed", type=int, help="of the first round; the next have the next")
    parser.add_argument("--jobs", type=int, default=200, help="in each round")
    parser.add_argument("--at-once", type=int, default=20, help="jobs that wait or run")
    parser.add_argument("--failing", type=float, default=0.01, help="share of calls to NVML")
    given = parser.parse_args()
    first = secrets.randbits(31) if given.seed is None else given.seed
    folder = Path(tempfile.mkdtemp(prefix="gpulease-chaos-"))
    print(f"first seed {first}; everything is kept in {folder}", flush=True)
    plan = Plan(given.jobs, given.at_once, given.failing)
    tallies: list[Tally] = []
    for seed in range(first, first + given.rounds):
        place = folder / str(seed)
        place.mkdir()
        tallies.append(run(place, plan, seed, _say))
        _say(_sentence(tallies[-1]))
    print(table(tallies))
    for tally in tallies:
        print(*(f"seed {tally.seed}: {sentence}" for sentence in tally.told), sep="\n", end="")
    return 1 if any(tally.told for tally in tallies) else 0


def _sentence(tally: Tally) -> str:
    faults = ", ".join(f"{count} {kind}" for kind, count in Counter(tally.faults).items())
    return f"seed {tally.seed}: {tally.grants} grants, {tally.polls} looks: {faults or 'no fault'}"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
