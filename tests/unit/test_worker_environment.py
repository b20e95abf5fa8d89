"""What a job finds in its environment, whatever the caller's held."""

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.worker.environment import LeasedGpu, WorkerOptions, worker_environment
from gpulease.worker.overhead import MIB, default_overhead

GIB = 1024 * MIB
HOOKS = Path("/opt/gpulease/hooks")
OLD, NEW = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"


def gpu(number: int = 0, memory: int = 4 * GIB, total: int = 80 * GIB) -> LeasedGpu:
    return LeasedGpu(f"GPU-{number:08d}-feed-beef", number, "H100", memory, total)


def made(
    base: dict[str, str] | None = None,
    gpus: list[LeasedGpu] | None = None,
    simulated: bool = False,
    beside: Any = None,
    alone: bool = False,
    cpus: int | None = None,
    **options: Any,
) -> dict[str, str]:
    return worker_environment(
        base or {},
        cpus=cpus,
        job="7",
        marker="m-7",
        gpus=[gpu()] if gpus is None else gpus,
        simulated=simulated,
        driver="575.1",
        hooks=HOOKS,
        options=WorkerOptions(**options),
        overhead_of=beside,
        alone=alone,
    )


leases = st.builds(
    lambda total, share: gpu(0, max(1, total * share // 100), total),
    st.integers(1, 2**40),
    st.integers(1, 100),
)


def test_the_job_sees_the_leased_gpus_by_their_full_uuids() -> None:
    environment = made(gpus=[gpu(3), gpu(5)])

    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-00000003-feed-beef,GPU-00000005-feed-beef"
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_numbers_count_the_leased_gpus_where_no_others_can_be_opened() -> None:
    environment = made(gpus=[gpu(5), gpu(3)], visible="index", alone=True)

    assert environment["CUDA_VISIBLE_DEVICES"] == "1,0"
    told = json.loads(environment["GPULEASE_HOOK"])
    assert told["visible"] == "1,0"
    assert [each["uuid"] for each in told["gpus"]] == [gpu(5).uuid, gpu(3).uuid]
    everywhere = made(gpus=[gpu(5), gpu(3)], alone=True)
    assert everywhere == made(gpus=[gpu(5), gpu(3)]), "UUIDs are the same everywhere"


def test_a_simulated_lease_never_names_a_number_that_may_be_a_real_gpu() -> None:
    environment = made(gpus=[gpu(0)], simulated=True, visible="index")

    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-00000000-feed-beef"


def test_the_job_knows_its_lease() -> None:
    environment = made(gpus=[gpu(0, 8 * GIB), gpu(1, 4 * GIB)])

    assert environment["GPULEASE_JOB"] == "7"
    assert environment["GPULEASE_WORKER"] == "m-7"
    assert environment["GPULEASE_MEMORY"] == str(4 * GIB)
    assert environment["GPULEASE_MEMORY_FRACTION"] == "0.050000"


@given(st.lists(leases, min_size=1, max_size=4))
def test_no_fraction_is_more_than_the_lease_on_any_gpu(gpus: list[LeasedGpu]) -> None:
    environment = made(gpus=gpus)

    share = Fraction(environment["GPULEASE_MEMORY_FRACTION"])
    assert all(share * each.total <= each.memory for each in gpus)
    pool = Fraction(environment[OLD])
    least = Fraction(1, 10**6)
    beside = default_overhead("jax", len(gpus))
    assert all(
        pool <= max(least, Fraction(max(0, each.memory - beside), each.total)) for each in gpus
    )
    assert pool > 0


@given(
    st.dictionaries(
        st.sampled_from([OLD, NEW]),
        st.one_of(st.text("01.e-+inf% ", max_size=5), st.floats().map(str), st.just(".01")),
    )
)
def test_jax_is_given_one_name_and_the_smaller_share(base: dict[str, str]) -> None:
    environment = made(base)

    assert NEW not in environment
    assert 0 < Fraction(environment[OLD]) <= Fraction(made()[OLD])
    if ".01" in base.values():
        assert Fraction(environment[OLD]) <= Fraction(1, 100)


@pytest.mark.parametrize(
    ("asked", "given_limit"),
    [
        ("1073741824", GIB),
        ("1%", 80 * GIB // 100),
        ("0", 4 * GIB - 600 * MIB),
        ("90%", 4 * GIB - 600 * MIB),
        ("plenty", 4 * GIB - 600 * MIB),
    ],
)
def test_cupy_keeps_a_smaller_limit_of_the_callers(asked: str, given_limit: int) -> None:
    limit = made({"CUPY_GPU_MEMORY_LIMIT": asked})["CUPY_GPU_MEMORY_LIMIT"]

    assert int(limit) == given_limit


@pytest.mark.parametrize(
    ("asked", "given_limit"),
    [("100", 100), ("0", 4096 - 600), ("90000", 4096 - 600), ("plenty", 4096 - 600)],
)
def test_paddle_gets_its_limit_in_mib_and_keeps_a_smaller_one(asked: str, given_limit: int) -> None:
    limit = made({"FLAGS_gpu_memory_limit_mb": asked})["FLAGS_gpu_memory_limit_mb"]

    assert int(limit) == given_limit


def test_a_lease_below_the_overhead_never_reads_as_no_limit() -> None:
    environment = made(gpus=[gpu(memory=100 * MIB)])

    assert environment["CUPY_GPU_MEMORY_LIMIT"] == "1"
    assert environment["FLAGS_gpu_memory_limit_mb"] == "1"
    assert environment[OLD] == "0.000001"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TF_FORCE_UNIFIED_MEMORY", "1"),
        ("TF_GPU_ALLOCATOR", "cuda_malloc_async"),
        ("XLA_PYTHON_CLIENT_ALLOCATOR", "platform"),
        ("XLA_PYTHON_CLIENT_ALLOCATOR", "CUDA_ASYNC"),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", ""),
    ],
)
def test_a_variable_that_would_leave_the_lease_is_dropped(name: str, value: str) -> None:
    assert name not in made({name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TF_FORCE_UNIFIED_MEMORY", "0"),
        ("XLA_PYTHON_CLIENT_ALLOCATOR", "default"),
        ("CUDA_MODULE_LOADING", "EAGER"),
        ("LC_ALL", " odd  value "),
    ],
)
def test_any_other_variable_of_the_caller_stays(name: str, value: str) -> None:
    assert made({name: value})[name] == value


@pytest.mark.parametrize(
    ("callers", "expected"),
    [
        (None, "/opt/gpulease/hooks"),
        ("", "/opt/gpulease/hooks"),
        ("/a:/b", "/opt/gpulease/hooks:/a:/b"),
        ("/a::/b", "/opt/gpulease/hooks:/a::/b"),
        ("/opt/gpulease/hooks:/a", "/opt/gpulease/hooks:/a"),
    ],
)
def test_the_hooks_come_first_and_the_callers_path_stays(
    callers: str | None, expected: str
) -> None:
    base = {} if callers is None else {"PYTHONPATH": callers}

    assert made(base)["PYTHONPATH"] == expected


def test_options_reach_processes_that_no_hook_reaches() -> None:
    environment = made(inter_op_threads=2, intra_op_threads=4, growth=True, strict=True)

    assert environment["TF_NUM_INTEROP_THREADS"] == "2"
    assert environment["TF_NUM_INTRAOP_THREADS"] == "4"
    assert environment["TF_FORCE_GPU_ALLOW_GROWTH"] == "true"
    assert environment["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert environment["GPULEASE_STRICT"] == "1"


def test_deterministic_sets_variables_that_every_version_accepts() -> None:
    environment = made({"TF_DETERMINISTIC_OPS": "0", "XLA_FLAGS": "--x"}, deterministic=True)

    assert environment["TF_DETERMINISTIC_OPS"] == environment["TF_CUDNN_DETERMINISTIC"] == "1"
    assert environment["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    # A TensorFlow that does not know a flag of XLA aborts.
    assert environment["XLA_FLAGS"] == "--x"
    assert json.loads(environment["GPULEASE_HOOK"])["options"]["deterministic"] is True


@pytest.mark.parametrize(
    ("own", "kept"), [(":16:8", ":16:8"), (":4096:8", ":4096:8"), (":0:0", ":4096:8")]
)
def test_a_workspace_of_ones_own_is_kept_where_it_is_deterministic(own: str, kept: str) -> None:
    name = "CUBLAS_WORKSPACE_CONFIG"

    assert made({name: own}, deterministic=True)[name] == kept
    assert made({name: own})[name] == own


def test_threads_follow_the_leased_cores_unless_the_user_set_them() -> None:
    assert "OMP_NUM_THREADS" not in made()
    assert made(cpus=8)["OMP_NUM_THREADS"] == made(cpus=8)["NUMEXPR_NUM_THREADS"] == "8"
    assert made({"OMP_NUM_THREADS": "1"}, cpus=8)["OMP_NUM_THREADS"] == "1"
    assert made(cpus=8, omp_threads=3)["OMP_NUM_THREADS"] == "3"
    assert made(cpus=8, processes=3)["OMP_NUM_THREADS"] == "2"
    assert made(cpus=2, processes=3)["OMP_NUM_THREADS"] == "1"


def test_threads_of_openmp_and_its_like_are_set_for_all_of_them() -> None:
    environment = made({"OMP_NUM_THREADS": "64"}, omp_threads=3)

    names = [name for name, value in environment.items() if name.endswith("_NUM_THREADS")]
    assert {environment[name] for name in names} == {"3"}
    assert {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"} <= set(names)


def test_one_variable_carries_all_that_the_hooks_need() -> None:
    carried = json.loads(
        made(gpus=[gpu(0), gpu(1)], split=3, inter_op_threads=1, intra_op_threads=2)[
            "GPULEASE_HOOK"
        ]
    )

    assert carried["visible"] == "GPU-00000000-feed-beef,GPU-00000001-feed-beef"
    assert carried["gpus"][1]["pools"]["tensorflow"] == 4 * GIB - 1400 * MIB
    assert carried["options"]["split"] == 3
    assert (carried["options"]["inter_op"], carried["options"]["intra_op"]) == (1, 2)
    assert carried["driver"] == "575.1"


@pytest.mark.parametrize(
    "wrong",
    [
        {"gpus": []},
        {"gpus": [gpu(memory=0)]},
        {"gpus": [gpu(memory=81 * GIB)]},
        {"split": 0},
    ],
)
def test_a_lease_that_makes_no_sense_is_an_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"at least|at most"):
        made(**wrong)


def test_what_was_learnt_of_a_framework_takes_the_place_of_the_table() -> None:
    environment = made(
        gpus=[gpu(0, 8 * GIB)],
        beside=lambda framework, _: (400 if framework == "torch" else 900) * MIB,
    )

    pools = json.loads(environment["GPULEASE_HOOK"])["gpus"][0]["pools"]
    assert pools.pop("torch") == 8 * GIB - 400 * MIB
    assert set(pools.values()) == {8 * GIB - 900 * MIB}
    assert environment["CUPY_GPU_MEMORY_LIMIT"] == str(8 * GIB - 900 * MIB)
