"""The rules inside the hooks, without a framework: visible devices, division, the ConfigProto."""

import copy
import importlib.util
import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goldens import sentence
from gpulease.worker.environment import HOOKS, LeasedGpu, WorkerOptions, worker_environment
from gpulease.worker.overhead import MIB, default_overhead


def hooks_module(name: str) -> Any:
    """Load a module of the hooks as sitecustomize does: by path, since they are on no sys.path."""
    if "_gpulease_hooks" not in sys.modules:
        folder = HOOKS / "_gpulease_hooks"
        spec = importlib.util.spec_from_file_location(
            "_gpulease_hooks", folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None and spec.loader is not None
        sys.modules["_gpulease_hooks"] = package = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(package)
    return importlib.import_module(f"_gpulease_hooks.{name}")


devices = hooks_module("devices")
partition: Callable[[list[float], int, int], list[float]] = hooks_module(
    "tensorflow_config"
).partition

UUIDS = ["GPU-aa11", "GPU-aa22"]
GPUS = [{"uuid": uuid, "index": index} for uuid, index in zip(UUIDS, (3, 5), strict=True)]
FIRST, SECOND = UUIDS
BOTH = f"{FIRST},{SECOND}"

IN_THE_LEASE = [
    # Numbers count the leased GPUs, whatever the machine calls them.
    ("0", FIRST),
    ("1", SECOND),
    ("1,0", f"{SECOND},{FIRST}"),
    (" 0 , 1 ", BOTH),
    ("0,", FIRST),
    (SECOND, SECOND),
    ("GPU-aa2", SECOND),
    (f"1,{FIRST}", f"{SECOND},{FIRST}"),
]
MAPPED = [
    # The machine's numbers of leased GPUs.
    ("3", FIRST),
    ("5", SECOND),
    ("5,3", f"{SECOND},{FIRST}"),
    # As many numbers as leased GPUs.
    ("6,7", BOTH),
    ("7,6", BOTH),
    ("0,3", BOTH),
    ("5,0", BOTH),
]
LOST = [
    ("2", "-1"),
    ("7", "-1"),
    ("0,1,2", BOTH),
    ("0,1,2,3", BOTH),
    ("1,3,5", SECOND),
    ("7,7", "-1"),
    ("3,3", "-1"),
    ("0,0", "-1"),
    ("0,x,1", FIRST),
    (f"0,{FIRST}", "-1"),
    ("GPU-aa", "-1"),
    ("GPU-bb", "-1"),
    ("all", "-1"),
    (",", "-1"),
]


@pytest.mark.parametrize(
    ("written", "meant", "is_notified", "is_complete"),
    [
        *((*case, False, True) for case in IN_THE_LEASE),
        *((*case, True, True) for case in MAPPED),
        *((*case, True, False) for case in LOST),
    ],
)
def test_visible_devices_are_read_as_a_choice_among_the_leased(
    written: str, meant: str, is_notified: bool, is_complete: bool
) -> None:
    chosen, text, complete = devices.choose(written, UUIDS, GPUS)

    assert (chosen, text is not None, complete) == (meant, is_notified, is_complete)


@pytest.mark.parametrize(
    ("written", "meant", "is_notified"),
    [("0", FIRST, False), ("3", FIRST, True), ("7", FIRST, True), ("0,1", FIRST, True),
     ("1,2", "-1", True), ("GPU-bb", "-1", True)],
)  # fmt: skip
def test_one_number_means_the_one_leased_gpu(written: str, meant: str, is_notified: bool) -> None:
    chosen, text, _ = devices.choose(written, UUIDS[:1], GPUS[:1])

    assert (chosen, text is not None) == (meant, is_notified)


@pytest.mark.parametrize(
    ("written", "meant"),
    [("5", "5"), ("5,3", "5,3"), ("0", "3"), ("1", "5"), ("4", "-1"), (SECOND, "5")],
)
def test_by_index_a_script_may_write_what_it_read_or_count_from_0(written: str, meant: str) -> None:
    assert devices.choose(written, ["3", "5"], GPUS)[0] == meant


@given(st.text("01357,GPU-a2x ", max_size=12))
def test_whatever_a_script_writes_stays_inside_the_lease(written: str) -> None:
    chosen, text, is_complete = devices.choose(written, UUIDS, GPUS)

    assert {*chosen.split(",")} <= {*UUIDS, "-1"}
    assert is_complete or text is not None
    assert is_complete == (chosen != "-1" and chosen.count(",") == written.rstrip(", ").count(","))


def test_each_value_outside_the_lease_is_notified_once() -> None:
    raw = json.dumps({"visible": BOTH, "gpus": GPUS})
    notices: list[tuple[str, bool]] = []

    for value in ("61", "61", "62,63", "-1", "", "none", "NoDevFiles", "0", None):
        devices.inside(value, raw, lambda *notice: notices.append(notice))

    assert [complete for _, complete in notices] == [False, True]


@pytest.mark.parametrize(
    ("written", "kept"), [("", ""), ("-1", "-1"), ("none", "-1"), ("NoDevFiles", "-1")]
)
def test_a_script_may_choose_the_cpu(written: str, kept: str) -> None:
    assert devices.inside(written, json.dumps({"visible": BOTH, "gpus": GPUS})) == kept


@pytest.mark.parametrize(("written", "says_so"), [("1", True), ("0,1", False), ("0", False)])
def test_a_number_with_two_meanings_counts_the_leased_gpus_and_says_so(
    written: str, says_so: bool
) -> None:
    gpus = [gpu | {"index": index} for gpu, index in zip(GPUS, (1, 3), strict=True)]
    chosen, text, is_complete = devices.choose(written, UUIDS, gpus)

    assert chosen == ",".join(UUIDS[int(number)] for number in written.split(","))
    assert (text is not None, is_complete) == (says_so, True)


@pytest.mark.parametrize(
    ("label", "written"),
    [("mapped", "5"), ("mapped-all", "6,7"), ("lost", "2"), ("lost-part", "0,1,2"),
     ("twice", "0,0"), ("unprintable", "2\x1b[1m")],
)  # fmt: skip
def test_what_became_of_visible_devices_reads(label: str, written: str) -> None:
    _, text, _ = devices.choose(written, UUIDS, GPUS)

    sentence(f"visible-{label}", text or "")


sizes = st.one_of(st.floats(width=32), st.integers(1, 100_000).map(float))


@given(st.lists(sizes, max_size=8), st.integers(8, 100_000), st.integers(1, 8))
def test_logical_gpus_together_never_exceed_the_limit(
    wishes: list[float], limit: int, split: int
) -> None:
    parts = partition(wishes, limit, split)

    assert len(parts) == (len(wishes) or split)
    assert sum(parts) <= limit
    assert all(part > 0 for part in parts)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=8), st.integers(0, 1000))
def test_wishes_that_fit_are_granted_as_they_are(wishes: list[int], spare: int) -> None:
    assert partition([float(wish) for wish in wishes], sum(wishes) + spare, 1) == wishes


def test_wishes_that_do_not_fit_keep_their_proportion() -> None:
    assert partition([6000, 2000], 4096, 1) == [3072, 1024]


def test_more_logical_gpus_than_mebibytes_are_refused() -> None:
    with pytest.raises(RuntimeError, match="cannot make 3 logical GPUs of 2M"):
        partition([1, 1, 1], 2, 1)


class Devices(list[Any]):
    """Stands in for a repeated field of messages."""

    def add(self) -> Any:
        self.append(SimpleNamespace(memory_limit_mb=[]))
        return self[-1]


def config(**gpu_options: Any) -> Any:
    experimental = SimpleNamespace(
        virtual_devices=Devices(), use_unified_memory=True, num_virtual_devices_per_gpu=0
    )
    options = {
        "per_process_gpu_memory_fraction": 0.0,
        "allow_growth": False,
        "allocator_type": "",
        "visible_device_list": "",
    }
    return SimpleNamespace(
        device_count={},
        gpu_options=SimpleNamespace(experimental=experimental, **(options | gpu_options)),
    )


def lease(count: int = 2, simulated: bool = False, **options: Any) -> Any:
    memory = 4096 * MIB + default_overhead("tensorflow", count)
    gpus = [LeasedGpu(f"GPU-{number}", number, "H", memory, 2 * memory) for number in range(count)]
    environment = worker_environment(
        {},
        job="1",
        marker="m",
        gpus=gpus,
        simulated=simulated,
        driver=None,
        hooks=HOOKS,
        options=WorkerOptions(**options),
    )
    return hooks_module("lease").Lease(environment["GPULEASE_HOOK"])


def clamped(proto: Any, granted: Any, cpu_count_is_set: bool = True) -> tuple[Any, Any]:
    pools = granted.pools("tensorflow", granted.visible.split(","))
    hooks_module("tensorflow_config").limit_config(proto, granted, pools, cpu_count_is_set)
    virtual = proto.gpu_options.experimental.virtual_devices
    return [device.memory_limit_mb for device in virtual], proto.gpu_options.visible_device_list


def test_every_gpu_is_listed_and_limited() -> None:
    proto = config(per_process_gpu_memory_fraction=0.9, allocator_type="cuda_malloc")

    assert clamped(proto, lease()) == ([[4096], [4096]], "0,1")
    assert proto.gpu_options.per_process_gpu_memory_fraction == 0
    assert proto.gpu_options.allocator_type == ""
    assert proto.gpu_options.experimental.use_unified_memory is False


@given(st.integers(1, 3), st.sampled_from([{}, {"GPU": 1}]), st.sampled_from(["", "1", "1,0"]))
def test_a_second_clamp_changes_nothing(split: int, count: dict[str, int], seen: str) -> None:
    proto = config(visible_device_list=seen)
    proto.device_count.update(count)
    granted = lease(split=split)
    clamped(proto, granted)
    once = copy.deepcopy(proto)

    clamped(proto, granted)

    assert proto == once


def test_tensorflows_own_way_to_split_a_gpu_is_kept_and_limited() -> None:
    proto = config()
    proto.gpu_options.experimental.num_virtual_devices_per_gpu = 4

    assert clamped(proto, lease(count=1)) == ([[1024] * 4], "0")
    assert proto.gpu_options.experimental.num_virtual_devices_per_gpu == 0


@pytest.mark.parametrize(
    ("sizes", "found"),
    [((1024, 2048), [1024, 2048]), ((2048, 6144), [1024, 3072]), ((0.5, 64), [1, 64])],
)
def test_a_lease_is_split_into_sizes_which_are_scaled_down_to_fit(
    sizes: tuple[float, ...], found: list[float]
) -> None:
    divided = lease(split_sizes=[int(size * MIB) for size in sizes])

    assert clamped(config(), divided) == ([found, found], "0,1")


def test_a_gpu_that_is_not_there_is_left_for_tensorflow_to_refuse() -> None:
    assert clamped(config(visible_device_list="7"), lease()) == ([[4096]], "7")


@pytest.mark.parametrize(
    ("given_count", "is_a_wish", "devices"),
    [({}, True, 2), ({"CPU": 1}, True, 1), ({"CPU": 1}, False, 2), ({"CPU": 5}, False, 5)],
)
def test_simulated_gpus_are_cpu_devices_unless_the_script_counts_its_own(
    given_count: dict[str, int], is_a_wish: bool, devices: int
) -> None:
    proto = config()
    proto.device_count.update(given_count)

    assert clamped(proto, lease(simulated=True), is_a_wish) == ([], "")
    assert proto.device_count["CPU"] == devices


def test_a_lease_that_fits_no_context_is_refused_with_the_smallest_that_does() -> None:
    granted = lease()
    granted.gpus[0]["memory"] = 512 * MIB

    with pytest.raises(RuntimeError, match=r"in a lease of 512M(.|\n)*--mem 2G"):
        clamped(config(), granted)
