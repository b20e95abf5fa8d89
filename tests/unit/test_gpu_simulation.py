"""The GPUs that `--simulate` describes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.errors import BadValue
from gpulease.gpu.simulated import SimulatedGpus, parse_simulation, simulated_uuid

G = 1024**3


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("8G", (8 * G,)),
        ("2x24G", (24 * G, 24 * G)),
        ("2x24G,1x80G", (24 * G, 24 * G, 80 * G)),
        (" 1 X 512M , 8GiB ", (G // 2, 8 * G)),
        ("64x1G", (G,) * 64),
    ],
)
def test_a_simulation_is_a_list_of_sizes(text: str, sizes: tuple[int, ...]) -> None:
    assert tuple(gpu.size for gpu in parse_simulation(text)) == sizes


@pytest.mark.parametrize(
    "text",
    [
        *("", "8G,", "x8G", "2x", "0x8G", "2x0G", "40%", "two", "65x1G", "99999x1G"),
        *("60x1G,5x1G", "2x2x8G", "8G\n9G", "٣x8G"),
    ],
)
def test_what_is_no_simulation_is_refused_with_a_hint(text: str) -> None:
    with pytest.raises(BadValue) as caught:
        parse_simulation(text)
    assert "2x24G" in (caught.value.hint or "")


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        gpus = parse_simulation(text)
    except BadValue:
        return
    assert 1 <= len(gpus) <= 64
    assert all(gpu.size > 0 and gpu.model for gpu in gpus)


def test_a_simulated_gpu_may_have_a_model() -> None:
    gpus = SimulatedGpus(parse_simulation("2x24G,1x80G:A100 PCIe"), "seed").read()
    assert [gpu.name for gpu in gpus] == ["Simulated 24G", "Simulated 24G", "Simulated A100 PCIe"]


def test_uuids_are_the_same_for_the_same_seed_and_differ_otherwise() -> None:
    uuids = [simulated_uuid(seed, index) for seed in ("a", "b") for index in range(64)]

    assert len(set(uuids)) == len(uuids)
    assert simulated_uuid("a", 3) == uuids[3]
