"""Run the benchmarks: `python -m benchmarks [--json FILE] [NAME...]`.

Each yields figures, or lines of text. All figures are in the table at the end. A figure that misses
its goal is no failure: machines differ, and what they share is asserted in tests.
"""

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from benchmarks import (
    answers,
    command,
    connections,
    jobs,
    links,
    memory,
    peers,
    planning,
    reaction,
    rest,
    seeing,
    shims,
    slurm,
    start,
    store,
    streams,
    submissions,
    top,
    web,
)
from benchmarks.figures import Figure, table
from benchmarks.machine import machine

BENCHMARKS: dict[str, Callable[[], Iterable[Figure | str]]] = {
    "planning": planning.run,
    "links": links.run,
    "command": command.run,
    "rest": rest.run,
    "memory": memory.run,
    "connections": connections.run,
    "store": store.run,
    "start": start.run,
    "submissions": submissions.run,
    "jobs": jobs.run,
    "shims": shims.run,
    "answers": answers.run,
    "streams": streams.run,
    "reaction": reaction.run,
    "peers": peers.run,
    "slurm": slurm.run,
    "top": top.run,
    "web": web.run,
    "seeing": seeing.run,
}


def main(arguments: list[str]) -> int:
    """Return 1 if a benchmark broke, and 0 whatever was measured."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(BENCHMARKS):
        parser.error(f"no benchmark named {', '.join(sorted(unknown))}")
    here = machine()
    for what, value in here.items():
        print(f"{what}: {value}")
    broken: list[str] = []
    figures = list(_measured(options.names or list(BENCHMARKS), broken))
    print("", *table(figures), sep="\n")
    if options.json:
        content = {"machine": here, "figures": [_as_json(each) for each in figures]}
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    if broken:
        print(f"broken: {', '.join(broken)}")
    return int(bool(broken))


def _measured(names: Iterable[str], broken: list[str]) -> Iterator[Figure]:
    """Yield the figures, and print each at once; add the benchmarks that fail to `broken`."""
    for name in names:
        print(f"\n{name}", flush=True)
        try:
            for each in BENCHMARKS[name]():
                print(f"  {each}", flush=True)
                if isinstance(each, Figure):
                    yield each
        except Exception:  # noqa: BLE001 - the others can still be measured
            traceback.print_exc()
            broken.append(name)


def _as_json(figure: Figure) -> dict[str, object]:
    return {**asdict(figure), "measured": figure.measured, "reached": figure.is_reached}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
