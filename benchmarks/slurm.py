"""What the hooks add to `srun`, on three clusters of one node: ours, empty ones, and none.

Slurm's own cost for calling any hooks is the difference between the last two.
"""

import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from benchmarks.figures import Figure
from benchmarks.timing import seconds
from gpulease.slurm.setup.node_files import NAME

_TESTS = Path(__file__).parents[1] / "tests"
_ROUNDS = 40
_EMPTY = "/bin/true"
_HOOK = f"/etc/slurm/{NAME}"


def run() -> Iterator[Figure | str]:
    """Measure `srun true` with the hooks, with empty ones, and without, in alternation."""
    sys.path.insert(0, str(_TESTS))
    from slurm.cluster import obstacle

    if (why := obstacle()) is not None:
        yield f"skipped: {why}"
        return
    with ExitStack() as opened:
        calls = {path: _srun(opened, path) for path in (_HOOK, _EMPTY, None)}
        rounds = [
            (seconds(_python), *(seconds(call) for call in calls.values())) for _ in range(_ROUNDS)
        ]
    python, ours, empty, bare = (statistics.median(column) for column in zip(*rounds, strict=True))
    added = statistics.median(round_[1] - round_[2] for round_ in rounds)
    slurms = statistics.median(round_[2] - round_[3] for round_ in rounds)
    yield _figure("prolog and task prolog, on top of empty ones", added, python, 1)
    yield _figure("empty prolog and task prolog: Slurm's own cost", slurms, python, 3)
    yield (
        f"srun true: {ours * 1e3:.1f} ms with our hooks, {empty * 1e3:.1f} ms with {_EMPTY}, "
        f"{bare * 1e3:.1f} ms without"
    )


def _srun(opened: ExitStack, hook: str | None) -> Callable[[], object]:
    """Return a call of srun on a new cluster with `hook` as prolog, epilog and task prolog."""
    from slurm.cluster import running
    from slurm.slurm_files import NodeSpec, Settings

    node = NodeSpec("n1", settings='cluster = "slurm"\n')
    cluster = opened.enter_context(running([node], Settings(hook=hook)))
    argv = cluster.command("srun", "--quiet", "--gres=shard:16", "true")
    return lambda: subprocess.run(argv, check=True)


def _python() -> None:
    subprocess.run([sys.executable, "-c", "pass"], check=True)


def _figure(what: str, added: float, python: float, goal: float) -> Figure:
    return Figure(what, added * 1e3, "ms", goal, python * 1e3, "python -c pass")
