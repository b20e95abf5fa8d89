"""The files of Slurm for a cluster on one machine, with short intervals."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpulease.gpu.simulated import parse_simulation
from gpulease.units import format_size

SHARD = 256 * 1024**2
"""Bytes of one shard."""
CPUS = 64
"""Pretended, for each node."""


@dataclass(frozen=True)
class NodeSpec:
    """A node: its name, and its simulated GPUs as `gpuleased --simulate` reads them."""

    name: str
    gpus: str = "2x24G"
    shards: int | None = None
    """For the node; None: all memory of its GPUs."""
    settings: str = ""
    """What /etc/gpulease/config.toml says, in TOML."""

    @property
    def sizes(self) -> list[int]:
        return [gpu.size for gpu in parse_simulation(self.gpus)]

    @property
    def types(self) -> list[str]:
        """The type of each GPU; Slurm 22.05 assigns GPUs without one twice, whole and as shards."""
        return [format_size(it).lower() for it in self.sizes]

    @property
    def gres(self) -> str:
        """What slurm.conf says of its GPUs and shards."""
        counted = Counter(self.types)
        gpus = [f"gpu:{kind}:{count}" for kind, count in counted.items()]
        return ",".join([*gpus, f"shard:{self.all_shards}"])

    @property
    def all_shards(self) -> int:
        return self.shards if self.shards is not None else sum(self.sizes) // SHARD


@dataclass(frozen=True)
class Hooks:
    """Paths on the nodes, as slurm.conf has them; `Cluster.install` makes such files."""

    prolog: str | None = None
    epilog: str | None = None
    task_prolog: str | None = None
    prolog_flags: str | None = None
    """Alloc makes each srun wait for 0.1 s, since slurmd polls."""


@dataclass(frozen=True)
class Ports:
    """Where the daemons listen."""

    controller: int
    nodes: Mapping[str, int]


@dataclass(frozen=True)
class Settings:
    """What a test changes about Slurm."""

    hooks: Hooks = field(default_factory=Hooks)
    slurm_lines: str = ""
    """Added to slurm.conf; a line with a known key replaces it."""
    gres_lines: str | None = None
    """All of gres.conf; None: a line for the GPUs and one for the shards of each node."""
    cgroup: bool = False
    """Whether jobs are in cgroups, see `machine.has_cgroups`; else Slurm knows a job's processes by
    their ancestry."""


def write_files(folder: Path, nodes: Sequence[NodeSpec], ports: Ports, settings: Settings) -> None:
    """Write slurm.conf, gres.conf and cgroup.conf."""
    (folder / "slurm.conf").write_text(slurm_conf(nodes, ports, settings))
    gres = settings.gres_lines if settings.gres_lines is not None else gres_conf(nodes)
    (folder / "gres.conf").write_text(gres)
    (folder / "cgroup.conf").write_text("CgroupPlugin=autodetect\nConstrainDevices=yes\n")


def slurm_conf(nodes: Sequence[NodeSpec], ports: Ports, settings: Settings) -> str:
    names = ",".join(node.name for node in nodes)
    chosen = {**_common(ports), **_hooks(settings.hooks), **_given(settings.slurm_lines)}
    if settings.cgroup:
        chosen["ProctrackType"] = "proctrack/cgroup"
        chosen["TaskPlugin"] = "task/cgroup"
    lines = [f"{key}={value}" for key, value in chosen.items()]
    lines += [
        f"NodeName={it.name} NodeAddr=127.0.0.1 Port={ports.nodes[it.name]} CPUs={CPUS} "
        f"RealMemory=256000 Gres={it.gres} State=UNKNOWN"
        for it in nodes
    ]
    lines += [f"PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP"]
    return "\n".join(lines) + "\n"


def gres_conf(nodes: Sequence[NodeSpec]) -> str:
    """Return the lines for the GPUs and shards of each node.

    A count without a file is divided evenly over the GPUs. A count for each file holds only where
    GPUs of different sizes have different types.
    """
    lines = ["AutoDetect=off"]
    for node in nodes:
        if len(set(node.types)) > 1:
            lines += _typed(node)
        else:
            files = f"Type={node.types[0]} File=/dev/nvidia[0-{len(node.sizes) - 1}]"
            lines.append(f"NodeName={node.name} Name=gpu {files}")
            lines.append(f"NodeName={node.name} Name=shard Count={node.all_shards}")
    return "\n".join(lines) + "\n"


def _typed(node: NodeSpec) -> Iterator[str]:
    for index, (size, kind) in enumerate(zip(node.sizes, node.types, strict=True)):
        file = f"File=/dev/nvidia{index}"
        yield f"NodeName={node.name} Name=gpu Type={kind} {file}"
        yield f"NodeName={node.name} Name=shard Count={size // SHARD} {file}"


def _common(ports: Ports) -> dict[str, str]:
    return {
        "ClusterName": "test",
        "SlurmctldHost": "ctl(127.0.0.1)",
        "SlurmctldPort": str(ports.controller),
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "AuthType": "auth/munge",
        "CredType": "cred/munge",
        # A requeued job waits this long at least; 5 s are the least that Slurm takes.
        "AuthInfo": "cred_expire=5",
        "StateSaveLocation": "/var/spool/slurmctld",
        "SlurmdSpoolDir": "/var/spool/slurmd",
        "SlurmctldPidFile": "/run/slurmctld.pid",
        "SlurmdPidFile": "/run/slurmd.pid",
        "SlurmctldDebug": "debug",
        "SlurmdDebug": "debug",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "SwitchType": "switch/none",
        "MpiDefault": "none",
        "JobAcctGatherType": "jobacct_gather/none",
        "AccountingStorageType": "accounting_storage/none",
        "GresTypes": "gpu,shard",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "SlurmdParameters": "config_overrides",
        "SchedulerType": "sched/backfill",
        "SchedulerParameters": (
            "nohold_on_prolog_fail,batch_sched_delay=0,sched_interval=1,bf_interval=1"
        ),
        "ReturnToService": "2",
        "JobRequeue": "1",
        "KillWait": "2",
        "InactiveLimit": "0",
        "MinJobAge": "120",
        # A crashed node is down after ten seconds.
        "MessageTimeout": "5",
        "SlurmctldTimeout": "3",
        "SlurmdTimeout": "3",
    }


def _hooks(hooks: Hooks) -> dict[str, str]:
    given = {
        "Prolog": hooks.prolog,
        "Epilog": hooks.epilog,
        "TaskProlog": hooks.task_prolog,
        "PrologFlags": hooks.prolog_flags,
    }
    return {key: path for key, path in given.items() if path is not None}


def _given(lines: str) -> dict[str, str]:
    pairs = (line.strip().partition("=") for line in lines.splitlines())
    return {key: value for key, _, value in pairs if key}
