"""What `gpulease-setup slurm` prints for a node, and what its checks find."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from gpulease.config import Settings
from gpulease.domain.gpu import Fault, GpuReading, GpuUuid
from gpulease.errors import SetupFailed
from gpulease.slurm.setup.check import (
    Found,
    checks,
    parse_config,
    polite_partition,
    shards_by_gpu,
    unfit,
)
from gpulease.slurm.setup.node_files import (
    NAME,
    SlurmNode,
    device_files,
    hook_text,
    install_hook,
    node_of,
)
from gpulease.slurm.setup.verb import lines
from gpulease.units import GIB, MIB

_PARTITIONS = """
PartitionName=high Default=NO DisableRootJobs=NO Nodes=n[1-2] PriorityTier=10 State=UP
PartitionName=closed Default=NO DisableRootJobs=NO Nodes=n1 PriorityTier=0 State=DOWN
PartitionName=main Default=YES DisableRootJobs=NO Nodes=n[1-2] PriorityTier=1 State=UP
PartitionName=users Default=NO DisableRootJobs=YES Nodes=n[1-2] PriorityTier=0 State=UP
PartitionName=others Default=NO DisableRootJobs=NO Nodes=n3 PriorityTier=0 State=UP
"""
SETTINGS = Settings(cluster="slurm", slurm={"node": "n1"})


def gpu(index: int, gib: float, **more: object) -> GpuReading:
    known = GpuReading(GpuUuid(f"GPU-{index}"), index, "A30", int(gib * GIB), minor=index)
    return replace(known, **more)  # type: ignore[arg-type]


def node(*gpus: GpuReading, settings: Settings = SETTINGS) -> SlurmNode:
    return node_of(settings, gpus, simulated=False)


def gres_conf(made: SlurmNode) -> list[str]:
    return [line.removeprefix("NodeName=n1 ") for line in made.gres_conf()]


def test_equal_gpus_share_a_line_for_their_files_and_one_for_their_shards() -> None:
    made = node(gpu(0, 24), gpu(1, 24))
    assert made.gres == "gpu:mem24g:2,shard:192"
    files = "Name=gpu Type=mem24g File=/dev/nvidia[0-1]"
    assert gres_conf(made) == ["AutoDetect=off", files, "Name=shard Count=192"]


def test_gpus_of_different_sizes_have_types_in_the_order_of_their_device_numbers() -> None:
    made = node(gpu(0, 24), gpu(1, 48), gpu(2, 48), gpu(3, 24))
    assert made.gres == "gpu:mem24g:1,gpu:mem48g:2,gpu:mem24g_2:1,shard:576"
    assert gres_conf(made)[1:] == [
        "Name=gpu Type=mem24g File=/dev/nvidia0",
        "Name=shard Count=96 File=/dev/nvidia0",
        "Name=gpu Type=mem48g File=/dev/nvidia1",
        "Name=shard Count=192 File=/dev/nvidia1",
        "Name=gpu Type=mem48g File=/dev/nvidia2",
        "Name=shard Count=192 File=/dev/nvidia2",
        "Name=gpu Type=mem24g_2 File=/dev/nvidia3",
        "Name=shard Count=96 File=/dev/nvidia3",
    ]


def test_the_margin_and_the_reserve_of_the_driver_are_no_shards() -> None:
    settings = replace(SETTINGS, margin=GIB)
    assert node(gpu(0, 24, reserved=300 * MIB), settings=settings).gres == "gpu:mem22g:1,shard:90"


def test_the_device_number_counts_and_not_the_index() -> None:
    made = node(gpu(0, 24, minor=2), gpu(1, 48, minor=0))
    assert made.gres == "gpu:mem48g:1,gpu:mem24g:1,shard:288"
    assert device_files([0, 1, 2, 5, 7]) == "/dev/nvidia[0-2,5,7]"


def test_local_gpus_are_left_out() -> None:
    settings = replace(SETTINGS, slurm={"node": "n1", "local_gpus": ("0", "GPU-2")})
    made = node(gpu(0, 24), gpu(1, 48), gpu(2, 24, mig_mode=True), settings=settings)
    assert made.gres == "gpu:mem48g:1,shard:192"
    assert gres_conf(made)[1] == "Name=gpu Type=mem48g File=/dev/nvidia1"
    printed = "\n".join(lines(made, settings))
    assert "# GPU 0 is left to the local queue" in printed
    with pytest.raises(SetupFailed, match="local_gpus names GPU-2"):
        node(gpu(0, 24), settings=settings)


@pytest.mark.parametrize(
    "wrong", [gpu(1, 24, mig_mode=True), gpu(1, 24, minor=None), gpu(1, 0, fault=Fault.LOST)]
)
def test_a_gpu_that_slurm_cannot_have_is_named_with_the_way_out(wrong: GpuReading) -> None:
    with pytest.raises(SetupFailed, match="GPU 1") as refused:
        node(gpu(0, 24), wrong)
    assert 'local_gpus = "1"' in (refused.value.hint or "")


# The checks.

CONFIG = """Configuration data as of 2026-11-23T02:25:17
ClusterName             = test
BatchStartTimeout       = 10 sec
Epilog                  = {hook}
GresTypes               = gpu,shard
JobRequeue              = 1
MessageTimeout          = 10 sec
ProctrackType           = proctrack/cgroup
Prolog                  = {hook}
PrologEpilogTimeout     = 65534
PrologFlags             = (null)
SchedulerParameters     = bf_interval=30,nohold_on_prolog_fail
SelectType              = select/cons_tres
SLURM_CONF              = /etc/slurm/slurm.conf
SLURM_VERSION           = 22.05.8
TaskPlugin              = task/cgroup,task/affinity
TaskProlog              = {hook}

Cgroup Support Configuration:
ConstrainDevices        = yes
"""
RECORD = {"State": "IDLE", "Gres": "gpu:mem24g:2,shard:192"}


@pytest.fixture
def hook(tmp_path: Path) -> Path:
    file = tmp_path / NAME
    file.write_text(hook_text(SETTINGS.socket))
    return file


def wrong(
    hook: Path,
    changed: Mapping[str, str] | None = None,
    record: Mapping[str, str] = RECORD,
    settings: Settings = SETTINGS,
) -> dict[str, str]:
    """Return the checks that are not ok, with their states."""
    config = {**parse_config(CONFIG.format(hook=hook))}
    config |= {key: [value] for key, value in (changed or {}).items()}
    made = node_of(settings, [gpu(0, 24), gpu(1, 24)], simulated=False)
    # No daemon answers, and this machine has no device files.
    found = Found(settings, made, config, record, answers=False, unfit=lambda file: None)
    ignored = ("daemon", "device files")
    return {
        it.name: it.state for it in checks(found) if it.state != "ok" and it.name not in ignored
    }


def test_a_node_as_it_should_be_passes(hook: Path) -> None:
    assert wrong(hook) == {}


@pytest.mark.parametrize(
    ("key", "value", "check", "state"),
    [
        ("SLURM_VERSION", "21.08.8", "Slurm", "failure"),
        ("SelectType", "select/linear", "plugin", "failure"),
        ("GresTypes", "gpu", "GresTypes", "failure"),
        ("Prolog", "/bin/true", "Prolog", "failure"),
        ("TaskProlog", "/nowhere/prolog", "TaskProlog", "failure"),
        ("ProctrackType", "proctrack/linuxproc", "processes", "warning"),
        ("ConstrainDevices", "no", "devices", "warning"),
        ("TaskPlugin", "task/affinity", "devices", "warning"),
        ("PrologFlags", "Alloc", "PrologFlags", "warning"),
        ("PrologEpilogTimeout", "10 sec", "PrologEpilogTimeout", "warning"),
        ("MessageTimeout", "5 sec", "MessageTimeout", "warning"),
        ("JobRequeue", "0", "JobRequeue", "warning"),
        ("SchedulerParameters", "bf_interval=30", "SchedulerParameters", "warning"),
    ],
)
def test_each_wrong_setting_of_slurm_is_found(
    hook: Path, key: str, value: str, check: str, state: str
) -> None:
    assert wrong(hook, {key: value}) == {check: state}


def test_settings_of_gpulease_are_compared_too(hook: Path) -> None:
    elsewhere = replace(SETTINGS, cluster="none", socket=Path("/run/other.sock"))
    found = wrong(hook, settings=elsewhere)
    assert set(found) == {"cluster", "Prolog", "Epilog", "TaskProlog"}


def test_a_hook_of_another_version_is_found_also_in_a_directory(hook: Path) -> None:
    folder = {"Prolog": str(hook.parent / "*")}
    assert wrong(hook, folder) == {}
    hook.write_text(hook_text(SETTINGS.socket) + "# changed\n")
    assert wrong(hook, folder) == dict.fromkeys(("Prolog", "Epilog", "TaskProlog"), "failure")


def test_a_script_of_the_admin_may_call_the_hook(hook: Path) -> None:
    script = hook.with_name("own")
    script.write_text(f"#!/bin/sh\nexec {hook}\n")
    assert wrong(hook, {"TaskProlog": str(script)}) == {}


def test_a_hook_that_users_cannot_run_is_unfit(hook: Path) -> None:
    hook.chmod(0o700)
    assert "not readable and executable" in (unfit(hook) or "")
    hook.parent.chmod(0o700)
    hook.chmod(0o755)
    assert "cannot access" in (unfit(hook) or "")


@pytest.mark.parametrize(
    ("gres", "state"),
    [
        ("gpu:a:2,shard:190", "warning"),
        ("gpu:a:2,shard:194", "failure"),
        ("gpu:a:1,shard:96", "failure"),
        ("gpu:a:1,gpu:b:1,shard:a:100,shard:b:92", "failure"),
        ("gpu:a:2(S:0-1),shard:192(S:0-1)", None),
        ("(null)", "failure"),
    ],
)
def test_counts_of_slurm_are_compared_with_the_gpus(
    hook: Path, gres: str, state: str | None
) -> None:
    found = wrong(hook, record={**RECORD, "Gres": gres})
    assert found == ({} if state is None else {"counts": state})


def test_gpus_without_a_type_are_found(hook: Path) -> None:
    assert wrong(hook, record={**RECORD, "Gres": "gpu:2,shard:192"}) == {"types": "warning"}


def test_shards_of_types_belong_to_the_gpus_of_the_type() -> None:
    typed = "gpu:small:1,gpu:48g:2,shard:small:96,shard:48g:384"
    assert shards_by_gpu(typed) == [96, 192, 192]
    # As slurmctld shows it before the node has registered.
    assert shards_by_gpu("gpu:small:1,gpu:big:2,shard:480") == [160] * 3


def test_a_node_that_slurm_does_not_know_or_use_is_found(hook: Path) -> None:
    assert wrong(hook, record={}) == {"node": "failure"}
    drained = {**RECORD, "State": "IDLE+DRAIN", "Reason": "Prolog error"}
    assert wrong(hook, record=drained) == {"node": "warning"}
    invalid = {**RECORD, "State": "IDLE+DRAIN+INVALID_REG", "Reason": "gres/gpu count"}
    assert wrong(hook, record=invalid) == {"node": "failure"}


def test_the_hook_has_the_socket_of_the_daemon() -> None:
    assert "$SOCKET = '/srv/g.sock';" in hook_text(Path("/srv/g.sock"))
    for refused in ("relative", "/with'quote", "/" + 107 * "a"):
        with pytest.raises(SetupFailed):
            hook_text(Path(refused))


def test_a_hook_that_users_cannot_run_is_installed_again(tmp_path: Path) -> None:
    said: list[str] = []
    for mode in (0o755, 0o700):
        install_hook([tmp_path], SETTINGS.socket, said.append)
        (tmp_path / NAME).chmod(mode)
    install_hook([tmp_path], SETTINGS.socket, said.append)
    assert [line.split()[0] for line in said] == ["installed", "unchanged", "replaced"]
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o755


def test_the_hook_is_not_installed_where_users_may_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(SetupFailed):
        install_hook([tmp_path], SETTINGS.socket, lambda line: None)
    with pytest.raises(SetupFailed):
        install_hook([tmp_path / "missing"], SETTINGS.socket, lambda line: None)


def test_the_job_that_is_tried_preempts_none() -> None:
    assert polite_partition(_PARTITIONS, ["high", "closed", "main", "users"]) == "main"
    assert polite_partition(_PARTITIONS, ["closed", "users"]) == "users"
    assert polite_partition(_PARTITIONS, ["closed", ""]) is None
