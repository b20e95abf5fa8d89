"""The files of Slurm for a cluster on one machine, with short intervals."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpulease.config import Settings as GpuleaseSettings
from gpulease.domain.gpu import GpuReading, GpuUuid
from gpulease.gpu.simulated import parse_simulation
from gpulease.slurm.setup.node_files import NAME, SlurmNode, node_of

from .release import chosen_release

HOOK = f"/etc/slurm/{NAME}"
CPUS = 64
"""Pretended, for each node."""


@dataclass(frozen=True)
class NodeSpec:
    """A node: its name, and its simulated GPUs as `gpuleased --simulate` reads them."""

    name: str
    gpus: str = "2x24G"
    settings: str = ""
    """What /etc/gpulease/config.toml says, in TOML."""

    @property
    def described(self) -> SlurmNode:
        """The node as `gpulease-setup slurm` describes it."""
        made = enumerate(parse_simulation(self.gpus))
        readings = [GpuReading(GpuUuid(str(at)), at, it.model, total=it.size) for at, it in made]
        return node_of(GpuleaseSettings(slurm={"node": self.name}), readings, simulated=True)


@dataclass(frozen=True)
class Ports:
    """Where the daemons listen."""

    controller: int
    nodes: Mapping[str, int]


@dataclass(frozen=True)
class Settings:
    """What a test changes about Slurm."""

    hook: str | None = HOOK
    """The prolog, epilog and task prolog; `Cluster.install` makes such files."""
    slurm_lines: str = ""
    """Added to slurm.conf; a line with a known key replaces it."""
    release: str | None = field(default_factory=chosen_release)
    """Of Slurm, such as 24.11; None: this machine's own."""
    cgroup: bool = False
    """Whether jobs are in cgroups, see `machine.has_cgroups`; else Slurm knows a job's processes by
    their ancestry."""


def write_files(folder: Path, nodes: Sequence[NodeSpec], ports: Ports, settings: Settings) -> None:
    """Write slurm.conf, gres.conf and cgroup.conf."""
    (folder / "slurm.conf").write_text(slurm_conf(nodes, ports, settings))
    (folder / "gres.conf").write_text(gres_conf(nodes))
    (folder / "cgroup.conf").write_text("CgroupPlugin=autodetect\nConstrainDevices=yes\n")


def slurm_conf(nodes: Sequence[NodeSpec], ports: Ports, settings: Settings) -> str:
    names = ",".join(node.name for node in nodes)
    hooks = ("Prolog", "Epilog", "TaskProlog") if settings.hook else ()
    given = (line.strip().partition("=") for line in settings.slurm_lines.splitlines())
    chosen = {
        **_common(ports),
        **dict.fromkeys(hooks, settings.hook),
        **{key: value for key, _, value in given if key},
    }
    if settings.cgroup:
        chosen["ProctrackType"] = "proctrack/cgroup"
        chosen["TaskPlugin"] = "task/cgroup"
    lines = [f"{key}={value}" for key, value in chosen.items()]
    lines += [
        f"NodeName={it.name} NodeAddr=127.0.0.1 Port={ports.nodes[it.name]} CPUs={CPUS} "
        f"RealMemory=256000 Gres={it.described.gres} State=UNKNOWN"
        for it in nodes
    ]
    lines += [f"PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP"]
    return "\n".join(lines) + "\n"


def gres_conf(nodes: Sequence[NodeSpec]) -> str:
    """Return the lines for the GPUs and shards of each node."""
    lines = [line for node in nodes for line in node.described.gres_conf()]
    return "\n".join(dict.fromkeys(lines)) + "\n"


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
        "MessageTimeout": "5",
        "SlurmctldTimeout": "3",
        # A busy machine answers late, and a node that is down loses its jobs. A test that waits for
        # a crashed node to be down sets 3.
        "SlurmdTimeout": "30",
    }
