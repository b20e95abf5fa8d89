"""`python -m torture [--kills N] [--seed N]`: exits 1 where something promised was not kept."""

import argparse
import random
import secrets
import sys
import tempfile
from pathlib import Path

from daemon_rig import Zygote
from torture import migrating, phases, steps
from torture.verdict import Tally, table


def main() -> int:
    parser = argparse.ArgumentParser(prog="torture", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="of the daemon, at random moments")
    parser.add_argument("--seed", type=int, help="to have chance choose as it did in another run")
    parser.add_argument("--only", choices=("daemon", "shims", "steps"), help="one phase alone")
    given = parser.parse_args()
    seed = secrets.randbits(32) if given.seed is None else given.seed
    folder = Path(tempfile.mkdtemp(prefix="gpulease-torture-"))
    print(f"seed {seed}; everything is kept in {folder}", flush=True)
    tallies = run(folder, given.kills, seed, given.only)
    print(table(tallies))
    faults = [sentence for tally in tallies for sentence in tally.told]
    print(*faults, f"seed {seed}", sep="\n")
    return 1 if faults else 0


def run(folder: Path, kills: int, seed: int, only: str | None = None) -> list[Tally]:
    """Run the phases."""
    tallies = []
    for name, phase in (("daemon", phases.kill_daemons), ("shims", phases.kill_shims)):
        if only in (None, name):
            (folder / name).mkdir()
            wanted = kills if name == "daemon" else max(1, kills // 4)
            rng = random.Random(f"{seed} {name}")
            tallies.append(phase(folder / name, wanted, rng, _say))
    if only in (None, "steps"):
        tallies += step_by_step(folder, seed)
    return tallies


def step_by_step(folder: Path, seed: int) -> list[Tally]:
    """Run the phases in which each kill is at a chosen step."""
    zygote = Zygote("torture.zygote")
    try:
        for name in ("steps", "migrations"):
            (folder / name).mkdir()
        return [
            steps.kill_at_each_step(folder / "steps", seed, zygote, _say),
            migrating.kill_while_it_migrates(folder / "migrations", zygote),
        ]
    finally:
        zygote.close()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
