"""Run the benchmarks: `python -m benchmarks [NAME...]`.

Machines differ and are noisy: each figure is printed with its ratio to a reference
measured in the same run.
"""

import sys

from benchmarks import command, daemon, jobs, planning, reaction, streams

BENCHMARKS = {
    "planning": planning.run,
    "command": command.run,
    "footprint": daemon.footprint,
    "submissions": daemon.submissions,
    "launches": daemon.launches,
    "jobs": jobs.run,
    "streams": streams.run,
    "reaction": reaction.run,
}


def main(names: list[str]) -> None:
    for name in names or list(BENCHMARKS):
        print(f"{name}")
        for line in BENCHMARKS[name]():
            print(f"  {line}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
