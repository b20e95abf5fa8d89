"""The options of `gpulease run` as those of Slurm: pure, without Slurm."""

import os
import re
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from gpulease.cli.caller import Caller
from gpulease.cli.request import build
from gpulease.cli.resolved_options import conditions
from gpulease.config import Settings
from gpulease.errors import BadConfiguration, BadUsage, BadValue, CannotLease
from gpulease.fingerprint import fingerprint_of
from gpulease.options import RunOptions
from gpulease.slurm.annotations import GpuSummary, NodeSummary, encode, learnt_keys, nodes_in
from gpulease.slurm.command.request import (
    Capacity,
    Size,
    capacity_of,
    dependency,
    passed_options,
    size_of,
    slurm_options,
)
from gpulease.slurm.command.run import batch_script, immediate, read_sizes, run_on_cluster
from gpulease.units import GIB, MIB, Share

ARGV = ("python3", "train.py", "--batch", "32")
TWO_OF_24G = Capacity(256 * MIB, frozenset({96}), 2, whole=96)
MIXED = Capacity(256 * MIB, frozenset({96, 192}), 2)


@dataclass
class Order:
    """A command line."""

    capacity: Capacity = TWO_OF_24G
    argv: tuple[str, ...] = ARGV
    options: dict[str, Any] = field(default_factory=dict)

    def with_(self, **options: Any) -> "Order":
        return Order(self.capacity, self.argv, options)

    @property
    def parts(self) -> tuple[RunOptions, Any]:
        typed = RunOptions(**self.options)
        return typed, build(typed, self.argv, Caller("/home/alice", {}, 0o22, {}, 0))

    def size(self) -> Size:
        return size_of(*self.parts, self.capacity, 4 * GIB)

    def words(self) -> list[str]:
        return slurm_options(*self.parts, "shard:16")


def order(capacity: Capacity = TWO_OF_24G, **options: Any) -> Order:
    return Order(capacity, options=options)


def test_memory_is_rounded_up_to_shards() -> None:
    assert order(mem="4G").size().gres == "shard:16"
    assert order(mem="4097M").size().gres == "shard:17"
    assert order(mem="1M").size() == Size("shard:1", "256M")


def test_a_share_needs_gpus_of_one_size() -> None:
    assert order(mem="50%").size().gres == "shard:48"
    with pytest.raises(BadValue, match="24G and 48G"):
        order(MIXED, mem="50%").size()


def test_whole_gpus_are_counted_as_gpus() -> None:
    assert order(MIXED, exclusive=True).size().gres == "gpu:1"
    assert order(exclusive=True, gpus=2, mem="20G").size().gres == "gpu:2"


def test_one_whole_gpu_is_all_its_shards_where_all_gpus_have_as_many() -> None:
    assert order(exclusive=True, mem="20G").size() == Size("shard:96", "a whole GPU")


def test_parts_of_several_gpus_are_refused() -> None:
    with pytest.raises(BadValue, match="a part of each of 2 GPUs") as error:
        order(mem="4G", gpus=2).size()
    assert "--gpus 2 --exclusive" in (error.value.hint or "")


def test_a_range_is_refused() -> None:
    with pytest.raises(BadValue, match=r"--mem 4G\.\.10G on a cluster"):
        order(mem="4G..10G").size()


def test_more_than_any_gpu_has_is_refused() -> None:
    assert order(mem="24G").size().gres == "shard:96"
    with pytest.raises(CannotLease, match="the largest GPU of the cluster offers 24G"):
        order(mem="24577M").size()
    with pytest.raises(CannotLease, match="no node of the cluster has more than 2"):
        order(gpus=3, exclusive=True).size()


def test_a_whole_gpu_of_a_certain_size_is_refused_where_sizes_differ() -> None:
    with pytest.raises(BadValue, match="Slurm may choose a GPU with 24G"):
        order(MIXED, mem="40G", exclusive=True).size()


def test_a_cluster_without_shards_is_refused_before_submission() -> None:
    with pytest.raises(CannotLease, match="no shards"):
        order(Capacity(), mem="4G").size()


def test_without_a_size_the_default_is_leased() -> None:
    assert order().size() == Size("shard:16", "4G", "the default")
    typed, request = order().parts
    assert size_of(typed, request, TWO_OF_24G, Share(percent=25)).gres == "shard:24"  # type: ignore[arg-type]


def test_what_a_node_has_learnt_is_the_size_without_one() -> None:
    fingerprint = fingerprint_of(ARGV, "/home/alice")
    assert fingerprint is not None
    exact, similar = learnt_keys(os.geteuid(), fingerprint)
    nodes = [{similar: 9 * GIB}, {exact: 2 * GIB}, {exact: 3 * GIB}]
    capacity = Capacity(256 * MIB, frozenset({96}), 2, nodes)
    assert order(capacity).size() == Size("shard:12", "3G", "since train.py needed that before")
    assert order(capacity, mem="1G").size().gres == "shard:4"


def test_options_become_those_of_slurm() -> None:
    words = order(
        time="90s", name="a b", array="0-9%2", held=True, nice=5, detach=True, requeue=True
    ).words()
    assert words[:5] == [
        "--nodes=1", "--ntasks=1", "--gres=shard:16", "--job-name=a b", "--chdir=/home/alice",
    ]  # fmt: skip
    assert set(words[5:]) == {
        "--export=ALL", "--time=2", "--array=0-9%2", "--hold", "--nice=5", "--requeue",
    }  # fmt: skip


def test_a_job_without_a_name_has_that_of_its_command() -> None:
    assert "--job-name=train.py" in order().words()


def test_only_the_main_process_of_a_batch_job_gets_the_early_signal() -> None:
    assert "--signal=10@120" in order(time="1h", early_signal="USR1@2m").words()
    assert "--signal=B:10@120" in order(time="1h", early_signal="USR1@2m", detach=True).words()


def test_a_time_limit_is_rounded_up_to_minutes() -> None:
    words = [order(mem="1G", time=each).words() for each in ("1s", "60s", "61s", "4h")]
    assert [word for each in words for word in each if word.startswith("--time")] == [
        "--time=1", "--time=1", "--time=2", "--time=240",
    ]  # fmt: skip


def test_ram_and_cores_are_those_that_slurm_holds_a_job_to() -> None:
    words = order(mem="1G", ram="32.5G", cpus=8).words()
    assert {"--mem=33280M", "--cpus-per-task=8"} <= set(words)
    assert not any(word.startswith(("--mem", "--cpus")) for word in order(mem="1G").words())


def test_notifications_are_mails_of_slurm() -> None:
    assert "--mail-type=END,FAIL" in order(notify=("end,fail", "oom,over-lease")).words()
    assert "--mail-type=BEGIN,END,FAIL,TIME_LIMIT_90" in order(notify=("all",)).words()
    for none in (), ("none",), ("over-lease",):
        assert not any("mail" in word for word in order(notify=none).words())
    with pytest.raises(BadValue, match="no event named 'ends'"):
        order(notify=("ends",)).words()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gpus": 0}, "cannot use --gpus 0: a job has 1 to 1024 GPUs"),
        ({"gpus": 1025, "exclusive": True}, "cannot use --gpus 1025: "),
        ({"name": "two\nlines"}, "cannot use --name "),
        ({"processes": 0}, "cannot use --processes 0: it is 1 to 4096"),
        ({"omp_threads": 4097}, "cannot use --omp-threads 4097: "),
        ({"ram": "4M"}, "cannot use --ram 4M: a job needs at least 32M to start"),
        ({"cpus": 0}, "cannot use --cpus 0: a job has 1 to 4096 cores"),
        ({"nice": 20}, "cannot use --nice 20: "),
    ],
    ids=str,
)
def test_a_value_that_the_daemon_would_refuse_never_reaches_slurm(
    options: dict[str, Any], said: str
) -> None:
    with pytest.raises(BadValue, match=re.escape(said)):
        typed, request = order(**options).parts
        run_on_cluster(request, typed)


WITHOUT_COUNTERPART = [
    {"gpu": ("1",)}, {"gpu_model": "A100"}, {"min_vram": "40G"}, {"same_model": True},
    {"preemptible": True}, {"priority": "high"}, {"retry_oom": "1.5x"}, {"grace": "5s"},
    {"verbose": True}, {"summary": True}, {"detach_keys": "ctrl-p"}, {"requeue": True},
    {"retries": 2}, {"array": "0-9"}, {"detach": True, "no_wait": True},
    {"detach": True, "wait": "5m"}, {"detach": True, "pty": True},
    {"detach": True, "grid": ("lr=1,2",)},
]  # fmt: skip


def test_the_index_is_not_put_into_a_command_of_slurm() -> None:
    with pytest.raises(BadValue, match=r"cannot use --array with \{\}"):
        Order(argv=("train.py", "{}"), options={"array": "0-9", "detach": True}).words()


@pytest.mark.parametrize("options", WITHOUT_COUNTERPART, ids=str)
def test_what_slurm_lacks_is_refused_with_a_hint(options: dict[str, Any]) -> None:
    with pytest.raises(BadValue, match="cannot use --") as error:
        order(**options).words()
    assert error.value.hint


def test_dependencies_are_those_of_slurm() -> None:
    numbers = {"sweep": "17", "last": "20"}
    words = conditions(["17,18:any", "17_3:fail", "sweep,last:ok"])
    assert [dependency(*word, numbers) for word in words] == [
        "afterok:17", "afterany:18", "afternotok:17_3", "afterok:17", "afterok:20",
    ]  # fmt: skip
    assert conditions(["a:b:any"]) == [("a:b", "any")]
    with pytest.raises(BadValue, match="no job of yours"):
        dependency("nosuch", "ok", numbers)


def test_options_of_slurm_are_passed_on() -> None:
    assert passed_options(["--partition=a -n 2", "--comment='x y'"]) == [
        "--partition=a", "-n", "2", "--comment=x y",
    ]  # fmt: skip
    for wrong in ("partition=a", "--comment='x"):
        with pytest.raises(BadUsage):
            passed_options([wrong])


def test_a_batch_script_quotes_every_word() -> None:
    script = batch_script(["echo", "$HOME", "it's", "a b\n"], "/data/my dir")
    assert script.startswith("#!/bin/bash\ncd -- '/data/my dir' || ")
    assert script.endswith("""exec -- echo '$HOME' 'it'"'"'s' 'a b\n'\n""")


def summary(*sizes: int, **fields: Any) -> str:
    gpus = [
        GpuSummary(i, f"GPU-{i}", "A100", "available", each, each) for i, each in enumerate(sizes)
    ]
    return encode(NodeSummary(0.0, 256 * MIB, tuple(gpus), **fields))


@pytest.mark.parametrize(
    ("gres", "extra", "sizes", "gpus", "whole"),
    [
        ("gpu:2,shard:192", "", {96}, 2, 96),
        ("gpu:2,shard:193", "", {96}, 2, None),
        ("gpu:a100:2(S:0-1),shard:a100:192(S:0-1)", "", {96}, 2, 96),
        ("gpu:24g:1,gpu:48g:1,shard:288", "", {288}, 2, None),
        ("gpu:24g:1,gpu:48g:1,shard:288", summary(24 * GIB, 48 * GIB), {96, 192}, 2, None),
        ("gpu:4", "", set(), 4, None),
        ("", "", set(), 0, None),
    ],
)
def test_the_sizes_of_gpus_are_those_that_slurm_counts(
    gres: str, extra: str, sizes: set[int], gpus: int, whole: int | None
) -> None:
    found = capacity_of(nodes_in(f"Gres={gres} Extra={extra}"), None)
    assert (found.sizes, found.gpus, found.whole) == (sizes, gpus, whole)


def test_a_gpu_without_shards_is_no_gpu_with_as_many_as_others() -> None:
    assert capacity_of(nodes_in("Gres=gpu:2,shard:192\nNodeName=n2"), None).whole == 96
    assert capacity_of(nodes_in("Gres=gpu:2,shard:192\nGres=gpu:1"), None).whole is None


@pytest.mark.parametrize(
    ("text", "shard", "default"),
    [
        ('cluster = "slurm"', None, Settings().default_memory),
        ('default_memory = "25%"\n[slurm]\nshard = "512M"', 512 * MIB, Share(percent=Fraction(25))),
        ('unknown = 3\ndefault_memory = "6G"', None, 6 * GIB),
    ],
)
def test_the_file_of_the_machine_sets_the_sizes(
    tmp_path: Path, text: str, shard: int | None, default: int | Share
) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text)
    assert read_sizes(str(file)) == (shard, default)
    file.unlink()
    assert read_sizes(str(file)) == (None, Settings().default_memory)


def test_sizes_that_cannot_be_used_are_an_error(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('default_memory = "4X"\n[slurm]\nshard = "256"')
    with pytest.raises(BadConfiguration, match="2 mistakes"):
        read_sizes(str(file))


def test_the_shard_is_that_of_the_settings_or_else_of_the_nodes() -> None:
    nodes = nodes_in(f"Gres=gpu:1,shard:8 Extra={summary(8 * GIB, learnt={'a': 1})}")
    assert capacity_of(nodes, None).shard == 256 * MIB
    assert capacity_of(nodes, GIB).shard == GIB
    assert capacity_of(nodes, None).learnt == [{"a": 1}]


@pytest.mark.parametrize(
    ("wait", "option"),
    [(0, "--immediate"), (0.5, "--immediate=2"), (1, "--immediate=2"), (90.2, "--immediate=91")],
)
def test_a_wait_is_never_the_one_second_that_means_at_once(wait: float, option: str) -> None:
    assert immediate(wait) == option
