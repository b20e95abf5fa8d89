"""`gpulease-setup slurm --check`: compares Slurm's configuration with this node and its hook.

`look` asks Slurm, the driver and the daemon; the checks compare what it found.
"""

import os
import re
import stat
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpulease.config import SYSTEM_CONFIG, Settings, SlurmSettings
from gpulease.errors import (
    EXIT_GAVE_UP,
    EXIT_OWN_FAILURE,
    GpuleaseError,
    SetupFailed,
    SlurmFailed,
    split_hint,
)
from gpulease.path_ownership import closed_to_others, shaky
from gpulease.slurm.commands import call, run_slurm, slurm_environment
from gpulease.slurm.records import gres_of_node, parse_record, parse_records
from gpulease.slurm.setup.node_files import (
    MARK,
    NAME,
    SlurmNode,
    daemon_status,
    device_files,
    hook_text,
    read_node,
)
from gpulease.units import format_size
from gpulease.wire.machine import CheckView

OLDEST = (22, 5)
"""The first version of Slurm with shards."""
_HOOKS = ("Prolog", "Epilog", "TaskProlog")
_SETTING = re.compile(r"^(\w+)(?:\[\d+\])? *= (.*)$", re.MULTILINE)
_LINES = "gpulease-setup slurm prints the lines for slurm.conf and gres.conf"
_STARTS_WITHIN_S, _ENDS_WITHIN_S = 20, 60
"""A job that tries the node."""
_LONGEST_HOOK_S = 18
"""It waits 15 s for a daemon that restarts, and has its own work."""


@dataclass(frozen=True, slots=True)
class Found:
    """What was found on this node."""

    settings: Settings
    node: SlurmNode
    slurm: Mapping[str, Sequence[str]]
    """Slurm's configuration; a key may have several values."""
    record: Mapping[str, str]
    """This node as Slurm knows it; empty if it does not."""
    answers: bool
    """Whether the daemon does."""
    unfit: Callable[[Path], str | None]
    """Returns why slurmd should not or cannot run a file."""


def look(settings: Settings) -> Found:
    """Ask Slurm, the driver and the daemon.

    Raises:
        SlurmFailed: Slurm does not answer.
        GpuleaseError: the GPUs cannot be read.
    """
    config = parse_config(run_slurm(("scontrol", "show", "config")))
    name = SlurmSettings(**settings.slurm).node_name
    try:
        record = parse_record(run_slurm(("scontrol", "--oneliner", "show", "node", name)))
    except GpuleaseError:
        record = {}
    try:
        node = read_node(settings)
    except GpuleaseError as error:
        if record:
            raise
        raise SetupFailed(
            f"cannot check this machine: Slurm knows no node {name}",
            "run it on the nodes, which sinfo -N lists: other machines need no check; for a new "
            "node, gpulease-setup slurm prints the lines that Slurm needs",
        ) from error
    return Found(settings, node, config, record, daemon_status(settings) is not None, unfit)


def parse_config(text: str) -> Mapping[str, Sequence[str]]:
    """Return the keys of `scontrol show config`; (null) is no value."""
    config: dict[str, list[str]] = {}
    for key, value in _SETTING.findall(text):
        if value.strip() not in ("", "(null)", "(none)"):
            config.setdefault(key, []).append(value.strip())
    return config


def checks(found: Found) -> Iterator[CheckView]:
    """Yield every check, the most fundamental first."""
    yield from _shards_of_slurm(found)
    yield from _node(found)
    yield from _device_files(found)
    current = hook_text(found.settings.socket)
    yield from (_hook(found, key, current) for key in _HOOKS)
    yield from _daemon(found)
    yield from _devices(found)
    yield from _requeueing(found)
    yield from _times(found)


def _first(found: Found, key: str) -> str:
    return next(iter(found.slurm.get(key, ())), "")


def _shards_of_slurm(found: Found) -> Iterator[CheckView]:
    """Check that Slurm counts shards."""
    version = _first(found, "SLURM_VERSION")
    numbers = tuple(int(each) for each in re.findall(r"\d+", version)[:2])
    yield _check(
        "Slurm", numbers >= OLDEST, f"version {version}, cluster {_first(found, 'ClusterName')}",
        f"version {version} has no shards", "use 22.05 or later",
    )  # fmt: skip
    plugin = _first(found, "SelectType")
    yield _check(
        "plugin", plugin == "select/cons_tres", plugin,
        f"SelectType is {plugin or 'not set'}, which cannot place shards",
        "slurm.conf: SelectType=select/cons_tres",
    )  # fmt: skip
    types = _first(found, "GresTypes")
    yield _check(
        "GresTypes", {"gpu", "shard"} <= set(types.split(",")), types,
        f"{types or 'none'}: gpu or shard is missing", "slurm.conf: GresTypes=gpu,shard",
    )  # fmt: skip


def _check(name: str, is_right: bool, said: str, wrong: str, hint: str) -> CheckView:
    if is_right:
        return CheckView(name, "ok", said)
    return CheckView(name, "failure", wrong, hint)


def _node(found: Found) -> Iterator[CheckView]:
    """Compare the node in Slurm with its GPUs."""
    name, record = found.node.name, found.record
    if not record:
        yield CheckView(
            "node", "failure", f"Slurm knows no node {name}",
            f'add it to slurm.conf, or set its name there: node = "..." below [slurm] in '
            f"{SYSTEM_CONFIG}",
        )  # fmt: skip
        return
    state = record.get("State", "unknown")
    why = record.get("Reason", "no reason given")
    if "INVALID_REG" in state:
        yield CheckView(
            "node", "failure", f"{name} is {state}: {why}",
            f"{_LINES}; then restart slurmctld and the slurmd of this node",
        )  # fmt: skip
    elif {"DOWN", "DRAIN", "NOT_RESPONDING"} & set(re.split(r"[+*]", state)):
        yield CheckView(
            "node", "warning", f"{name} is {state}: {why}",
            f"when that is over: scontrol update nodename={name} state=resume",
        )  # fmt: skip
    else:
        yield CheckView("node", "ok", f"{name} is {state}")
    yield _counts(found, record.get("Gres", ""))
    if ("gpu", "") in gres_of_node(record.get("Gres", "")):
        yield CheckView(
            "types", "warning",
            "GPUs have no type: Slurm 22.05 starts jobs for whole GPUs where shards are in use, "
            "and they are refused there", _LINES,
        )  # fmt: skip


def shards_by_gpu(gres: str) -> list[int]:
    """Return the shards of each GPU in a node's Gres: its order, and evenly within a type."""
    counts = gres_of_node(gres)
    gpus = {kind: count for (name, kind), count in counts.items() if name == "gpu"}
    shards = {kind: count for (name, kind), count in counts.items() if name == "shard"}
    if set(shards) != set(gpus):
        every = sum(gpus.values())
        return [sum(shards.values()) // every] * every if every else []
    return [shards[kind] // count for kind, count in gpus.items() for _ in range(count)]


def _counts(found: Found, gres: str) -> CheckView:
    node = found.node
    known = shards_by_gpu(gres)
    if len(known) != len(node.gpus):
        return CheckView(
            "counts", "failure",
            f"Slurm knows {len(known)} GPUs of this node, which has {len(node.gpus)} for it",
            _LINES,
        )  # fmt: skip
    for gpu, slurms, ours in zip(node.gpus, known, node.shards, strict=True):
        if slurms > ours:
            return CheckView(
                "counts", "failure",
                f"Slurm gives GPU {gpu.label} {slurms} shards, and it has memory for {ours}: "
                "jobs that do not fit are refused on this node", _LINES,
            )  # fmt: skip
    unused = sum(node.shards) - sum(known)
    if unused:
        return CheckView(
            "counts", "warning",
            f"Slurm does not know {unused} shards ({format_size(unused * node.shard)}) of this "
            "node, so no job can use them", _LINES,
        )  # fmt: skip
    return CheckView("counts", "ok", f"{gres}, shards of {format_size(node.shard)}")


def _device_files(found: Found) -> Iterator[CheckView]:
    missing = [it for it in found.node.minors if not Path(f"/dev/nvidia{it}").exists()]
    if missing and found.node.simulated:
        yield CheckView(
            "device files", "warning",
            f"{device_files(missing)} does not exist, and slurmd needs a file for each GPU",
            "for simulated GPUs any character device will do: mknod /dev/nvidia0 c 60 0",
        )  # fmt: skip
    elif missing:
        yield CheckView(
            "device files", "failure", f"{device_files(missing)} does not exist",
            "run as root: nvidia-modprobe -u -c=0",
        )  # fmt: skip


def _patterns(found: Found, key: str) -> list[str]:
    folder = Path(_first(found, "SLURM_CONF") or "/etc/slurm/slurm.conf").parent
    return [str(folder / each) for each in found.slurm.get(key, ())]


def _files(found: Found, key: str) -> list[Path]:
    # The patterns are absolute, those of glob(7).
    found_by = (sorted(Path("/").glob(each.lstrip("/"))) for each in _patterns(found, key))
    return [file for files in found_by for file in files]


def _hook(found: Found, key: str, current: str) -> CheckView:
    """Check that Slurm calls the hook, and that it is the one of this version."""
    install, files = "gpulease-setup slurm --install", _files(found, key)
    for file in files:
        text = file.read_text(errors="replace")
        if MARK not in text and NAME not in text:
            continue
        if (wrong := found.unfit(file)) is not None:
            again = f"{install} {file.parent} writes it again" if MARK in text else "chmod 755"
            return CheckView(
                key, "failure", wrong,
                f"{again}; all directories above must belong to root, and users must have access",
            )  # fmt: skip
        if text == current:
            return CheckView(key, "ok", str(file))
        if MARK in text:
            return CheckView(
                key, "failure", f"{file} is of another version or for another socket",
                f"{install} {file.parent}",
            )  # fmt: skip
        return CheckView(key, "ok", f"{file} calls {NAME}")
    named = ", ".join(_patterns(found, key)) or "not set"
    missing = ", and there is no such file" if found.slurm.get(key) and not files else ""
    return CheckView(
        key, "failure", f"Slurm does not call {NAME}: {key} is {named}{missing}",
        f"{install}, then slurm.conf: {key}=/etc/slurm/{NAME}; or call it in your own script",
    )  # fmt: skip


def unfit(file: Path) -> str | None:
    """Return why slurmd should not or cannot run a file, which task prologs run as users.

    Who runs a script must be able to read it.
    """
    if ~file.stat().st_mode & (stat.S_IROTH | stat.S_IXOTH):
        return f"{file} is not readable and executable for all users"
    if (closed := closed_to_others(file)) is not None:
        return f"users cannot access {closed}"
    return shaky(file, 0)


def _daemon(found: Found) -> Iterator[CheckView]:
    settings = found.settings
    if settings.cluster != "slurm":
        yield CheckView(
            "cluster", "failure", f"the setting cluster is {settings.cluster}",
            f'in {SYSTEM_CONFIG}: cluster = "slurm", then systemctl reload gpuleased',
        )  # fmt: skip
    if not found.answers:
        yield CheckView(
            "daemon", "failure", f"gpuleased does not answer on {settings.socket}",
            "systemctl enable --now gpuleased; its log: journalctl -u gpuleased",
        )  # fmt: skip
        return
    yield CheckView("daemon", "ok", f"answers on {settings.socket}")
    if hook := next((it for it in _files(found, "Epilog") if it.name == NAME), None):
        wrong, hint = split_hint(_try_hook(hook))
        said = " ".join(wrong.split()) or f"{hook} reaches gpuleased"
        yield CheckView("hook", "failure" if wrong else "ok", said, hint)


def _try_hook(file: Path) -> str:
    """Run the hook as the epilog of a job that does not exist; return what is wrong, or ""."""
    job = {"SLURM_SCRIPT_CONTEXT": "epilog_slurmd", "SLURM_JOB_ID": "0", "SLURM_JOB_GPUS": "0"}
    try:
        done = subprocess.run(
            [file], env=job, capture_output=True, check=False, timeout=_LONGEST_HOOK_S, text=True,
            errors="replace",
        )  # fmt: skip
    except OSError as error:
        return f"{file} does not run ({error.strerror}); is /usr/bin/perl there?"
    except subprocess.TimeoutExpired:
        return f"{file} does not end within {_LONGEST_HOOK_S} s"
    return done.stderr.strip()


def polite_partition(shown: str, names: Sequence[str]) -> str | None:
    """Return the partition of `names` whose jobs preempt no others; None if none takes jobs.

    `shown` is what `scontrol --oneliner show partition` prints.
    """
    open_ = [
        it
        for it in parse_records(shown)
        if it.get("PartitionName") in names and it.get("State") == "UP"
    ]
    tiers = {
        it["PartitionName"]: (it.get("DisableRootJobs") == "YES", int(it.get("PriorityTier", "1")))
        for it in open_
    }
    return min(tiers, key=lambda name: tiers[name], default=None)


def try_job(found: Found) -> CheckView:
    """Run a job with one shard on this node, as root, and look at its lease."""
    name = found.node.name
    try:
        partitions = run_slurm(("scontrol", "--oneliner", "show", "partition"))
    except GpuleaseError:
        partitions = ""
    partition = polite_partition(partitions, found.record.get("Partitions", "").split(","))
    line = [
        "srun", f"--immediate={_STARTS_WITHIN_S}", "--time=1", "--job-name=gpulease-check",
        "--chdir=/", f"--nodelist={name}", *([f"--partition={partition}"] if partition else []),
        "--gres=shard:1", "printenv", "GPULEASE_MEMORY",
    ]  # fmt: skip
    variables = {key: text for key, text in os.environ.items() if not key.startswith("SLURM_")}
    codes = {"SLURM_EXIT_ERROR": str(EXIT_OWN_FAILURE), "SLURM_EXIT_IMMEDIATE": str(EXIT_GAVE_UP)}
    try:
        done = call(line, slurm_environment(variables) | codes, _ENDS_WITHIN_S)
    except SlurmFailed as error:
        return CheckView(
            "job", "failure", f"one with one shard did not end: {error.message}",
            f"squeue --nodelist={name} shows it; the log of slurmd may say more",
        )  # fmt: skip
    said = " ".join(f"{done.stdout} {done.stderr}".split())
    if done.returncode == EXIT_GAVE_UP:
        return CheckView(
            "job", "warning",
            f"not tried: Slurm did not start a job here within {_STARTS_WITHIN_S} s",
            f"try again when the node has a free shard and core: sinfo --nodes={name}",
        )  # fmt: skip
    if done.returncode == EXIT_OWN_FAILURE:
        return CheckView("job", "warning", f"not tried: Slurm takes no job of root here: {said}")
    if (done.returncode, done.stdout.strip()) == (0, str(found.node.shard)):
        size = format_size(found.node.shard)
        return CheckView("job", "ok", f"one with one shard ran here, under a lease of {size}")
    if done.returncode == 0:
        said = f"its lease is {done.stdout.strip() or 'unknown'} bytes, not {found.node.shard}"
    return CheckView(
        "job", "failure", f"one with one shard failed: {said}",
        "the logs of slurmd and of gpuleased (journalctl -u gpuleased) say more",
    )  # fmt: skip


def _devices(found: Found) -> Iterator[CheckView]:
    """Warn where a job can reach other GPUs, or leave processes behind."""
    if _first(found, "ProctrackType") != "proctrack/cgroup":
        yield CheckView(
            "processes", "warning",
            f"{_first(found, 'ProctrackType')} loses processes that leave the process tree of "
            "their job",
            "slurm.conf: ProctrackType=proctrack/cgroup",
        )  # fmt: skip
    has_plugin = "task/cgroup" in _first(found, "TaskPlugin")
    if has_plugin and _first(found, "ConstrainDevices").lower() == "yes":
        yield CheckView("devices", "ok", "jobs can open their own GPUs only")
    else:
        yield CheckView(
            "devices", "warning",
            "only CUDA_VISIBLE_DEVICES keeps a job on its own GPUs",
            "slurm.conf: TaskPlugin=task/cgroup; cgroup.conf: ConstrainDevices=yes",
        )  # fmt: skip


def _times(found: Found) -> Iterator[CheckView]:
    flags = _first(found, "PrologFlags").lower().split(",")
    if "alloc" in flags and "contain" not in flags:
        yield CheckView(
            "PrologFlags", "warning", "with Alloc, each srun starts about 0.1 s later",
            "gpulease does not need it: remove it from slurm.conf if nothing else does",
        )  # fmt: skip
    limit = _seconds(found, "PrologEpilogTimeout")
    if limit is not None and limit < _LONGEST_HOOK_S:
        yield CheckView(
            "PrologEpilogTimeout", "warning",
            f"after {limit} s Slurm kills a prolog, which may wait 15 s for gpuleased",
            f"slurm.conf: PrologEpilogTimeout={_LONGEST_HOOK_S} or more",
        )  # fmt: skip
    patience = [_seconds(found, key) for key in ("MessageTimeout", "BatchStartTimeout")]
    if sum(each or 0 for each in patience) < _LONGEST_HOOK_S and None not in patience:
        yield CheckView(
            "MessageTimeout", "warning",
            "srun gives up after MessageTimeout + BatchStartTimeout; a prolog may wait 15 s for "
            "gpuleased",
            "slurm.conf: MessageTimeout=10 or more",
        )  # fmt: skip


def _seconds(found: Found, key: str) -> int | None:
    number = re.match(r"\d+", _first(found, key))
    return int(number[0]) if number else None


def _requeueing(found: Found) -> Iterator[CheckView]:
    """Warn where jobs that a node cannot start do not run on another one."""
    if "nohold_on_prolog_fail" not in _first(found, "SchedulerParameters"):
        yield CheckView(
            "SchedulerParameters", "warning",
            "a batch job whose node has no gpuleased is held until an admin releases it",
            "slurm.conf: SchedulerParameters=nohold_on_prolog_fail",
        )  # fmt: skip
    if _first(found, "JobRequeue") == "0":
        yield CheckView(
            "JobRequeue", "warning",
            "jobs that find their memory used are not queued again unless they ask for it",
            "slurm.conf: JobRequeue=1",
        )  # fmt: skip
