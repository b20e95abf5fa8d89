"""The page of `gpulease status --topology`: the links between GPUs, and the socket of each."""

from __future__ import annotations

from itertools import combinations

from gpulease.cli.light_connection import light_client
from gpulease.cli.render import print_stdout, show_page, stdout_screen
from gpulease.cli.tables import Block, Column, Page, Table, line
from gpulease.drawing.gpus import labels_in_ranges
from gpulease.drawing.words import UNKNOWN, clean
from gpulease.errors import BadValue
from gpulease.light_json import indent

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from gpulease.wire.machine import GpuTopologyView, TopologyView

_WORDS: Mapping[str, str] = {
    "PIX": "through one PCIe switch",
    "PXB": "through several PCIe switches",
    "PHB": "through the host bridge of one PCIe tree",
    "NODE": "between host bridges of one socket",
    "SYS": "between sockets",
    UNKNOWN: "not known",
}
"""As in nvidia-smi topo -m."""
_OTHER_COLUMNS = 4
"""The width of the GPU before the links, less the gap after the last of them."""


def print_topology(
    *, json: bool, socket: Path | str | None, others: Sequence[str | None] = ()
) -> int:
    """Print how the GPUs are linked; `others` are options that do not go with it.

    Raises:
        BadValue: one of them is given.
    """
    if any(each is not None for each in others):
        raise BadValue("cannot use --topology with --queue or --watch: it shows no jobs")
    daemon = light_client(socket)
    if json:
        print_stdout(indent(daemon.topology_json()))
    else:
        screen = stdout_screen()
        show_page(page(daemon.topology(), screen.width), screen)
    return 0


def page(view: TopologyView, width: int | None) -> Page:
    """Lay out the links as a matrix, in parts where it is wider than the terminal."""
    if not view.gpus:
        return [line("the driver shows no GPU", "dim")]
    words = {
        (gpu.uuid, link.gpu): f"NV{link.nvlinks}" if link.nvlinks else link.path or UNKNOWN
        for gpu in view.gpus
        for link in gpu.links
    }
    cell = 1 + max(map(len, (*words.values(), *(clean(gpu.label) for gpu in view.gpus))))
    most = len(view.gpus) if width is None else max(1, (width - _OTHER_COLUMNS) // cell)
    parts = -(-len(view.gpus) // most)
    each = -(-len(view.gpus) // parts)
    blocks: list[Block] = []
    for first in range(0, len(view.gpus), each):
        blocks += _matrix(view.gpus, view.gpus[first : first + each], words, cell), line("")
    pairs = ((one.uuid, other.uuid) for one, other in combinations(view.gpus, 2))
    return [*blocks, *_sockets(view.gpus), *_legend({words.get(each, UNKNOWN) for each in pairs})]


def _matrix(
    gpus: Sequence[GpuTopologyView],
    to: Sequence[GpuTopologyView],
    words: Mapping[tuple[str, str], str],
    cell: int,
) -> Table:
    def row(texts: Iterable[str]) -> str:
        return "".join(text.ljust(cell) for text in texts).rstrip()

    def word(one: GpuTopologyView, other: GpuTopologyView) -> str:
        return "X" if one is other else words.get((one.uuid, other.uuid), UNKNOWN)

    return Table(
        (Column("GPU", right=True), Column(row(clean(each.label) for each in to))),
        tuple((line(clean(gpu.label)), line(row(word(gpu, each) for each in to))) for gpu in gpus),
    )


def _sockets(gpus: Sequence[GpuTopologyView]) -> Iterator[Block]:
    """Yield a line for each set of GPUs with the same processors, as far as these are known."""
    found: dict[tuple[int | None, str], list[int]] = {}
    for place, gpu in enumerate(gpus):
        if gpu.cpus is not None:
            found.setdefault((gpu.numa_node, gpu.cpus), []).append(place)
    labels = [clean(gpu.label) for gpu in gpus]
    for (node, cpus), places in found.items():
        name = "" if node is None else f"node {node}: "
        which = f"{'GPU' if len(places) == 1 else 'GPUs'} {labels_in_ranges(places, labels)}"
        yield line(f"{name}{which}, processors {clean(cpus)}")


def _legend(used: set[str]) -> Iterator[Block]:
    if any(word.startswith("NV") for word in used):
        yield line("NV: NVLinks, between the two GPUs or of each to a switch between them", "dim")
    yield from (line(f"{word}: {text}", "dim") for word, text in _WORDS.items() if word in used)
