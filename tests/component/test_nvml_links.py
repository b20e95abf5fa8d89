"""What NvmlProbe makes of the links between GPUs, through the real ABI of the driver's library."""

from dataclasses import replace
from pathlib import Path

import pytest

from gpulease.domain.gpu import GpuReading, Link
from nvml_stand_in import Card, Code, ProbeProcess, StandIn
from topologies import TOPOLOGIES, bus, matrix, nvml_ancestors, nvml_links

_ASKED = (
    "nvmlDeviceGetNvLinkState", "nvmlDeviceGetNvLinkRemotePciInfo_v2", "nvmlDeviceGetP2PStatus",
    "nvmlDeviceGetTopologyCommonAncestor", "nvmlDeviceGetCpuAffinity",
    "nvmlDeviceGetMemoryAffinity",
)  # fmt: skip


def cards(name: str) -> list[Card]:
    """Return a machine of two sockets with 16 processors each."""
    known = zip(nvml_links(name), nvml_ancestors(name), strict=True)
    return [
        Card(
            bus=bus(index),
            links=links,
            ancestors=ancestors,
            node=index // 4,
            cpus=[*range(8 * (index // 4), 8 * (index // 4) + 8), 16 + index // 4],
        )
        for index, (links, ancestors) in enumerate(known)
    ]


def read(tmp_path: Path, gpus: list[Card], missing: tuple[str, ...] = ()) -> tuple[GpuReading, ...]:
    with ProbeProcess(StandIn(tmp_path, gpus, missing=missing).environment()) as probe:
        assert probe.error is None
        return probe.read()


@pytest.mark.parametrize("name", sorted(TOPOLOGIES))
def test_the_links_of_a_machine_are_those_that_nvidia_smi_shows(name: str, tmp_path: Path) -> None:
    gpus = read(tmp_path, cards(name))
    for gpu, row in zip(gpus, matrix(name), strict=True):
        known = {link.gpu: link for link in gpu.links}
        links = [known.get(other.uuid) for other in gpus]
        assert [_word(link) for link in links] == row
    assert [gpu.numa_node for gpu in gpus] == [0] * 4 + [1] * 4
    assert [gpus[0].cpus, gpus[7].cpus] == ["0-7,16", "8-15,17"]


def _word(link: Link | None) -> str | None:
    if link is None:
        return "X"
    return f"NV{link.nvlinks}" if link.nvlinks else link.path


def test_an_inactive_link_is_none_and_so_is_one_to_a_switch_on_one_side(tmp_path: Path) -> None:
    switch = "00000000:C0:00.0"
    gpus = read(
        tmp_path,
        [
            Card(bus=bus(0), links=[bus(1), None, switch]),
            Card(bus=bus(1), links=[None, bus(0)]),
            Card(bus=bus(2), links=[None, None]),
        ],
    )
    assert [gpu.links for gpu in gpus] == [
        (Link(gpus[1].uuid, 1),), (Link(gpus[0].uuid, 1),), (),
    ]  # fmt: skip


@pytest.mark.parametrize("code", [Code.NOT_SUPPORTED, Code.UNKNOWN, Code.GPU_IS_LOST])
def test_what_the_driver_does_not_say_is_no_link_and_no_fault(tmp_path: Path, code: int) -> None:
    silent = [
        replace(card, faults=dict.fromkeys(_ASKED, code)) for card in cards("bridged pairs")[:2]
    ]
    for gpu in read(tmp_path, silent):
        assert (gpu.fault, gpu.links, gpu.numa_node, gpu.cpus) == (None, (), None, None)


def test_an_old_driver_without_these_functions_is_read_as_before(tmp_path: Path) -> None:
    for gpu in read(tmp_path, cards("NVSwitch"), missing=_ASKED):
        assert (gpu.fault, gpu.total, gpu.links) == (None, Card().total, ())


def test_links_are_read_with_the_list_of_the_gpus_and_not_at_each_reading(tmp_path: Path) -> None:
    both = cards("bridged pairs")[:2]
    stand_in = StandIn(tmp_path, [both[0], replace(both[1], lost=True, stays_lost=True)])

    def asked() -> int:
        return sum(line.startswith(_ASKED) for line in stand_in.calls())

    with ProbeProcess(stand_in.environment()) as probe:
        assert probe.read()[0].links == ()
        before = asked()
        probe.read()
        assert asked() == before
        # The GPU that comes back is found by a new session, which lists all of them.
        stand_in.change(1, lost=False)
        found = probe.read_until(lambda gpus: gpus[1].fault is None)
        assert [link.nvlinks for gpu in found for link in gpu.links] == [4, 4]
