"""What scope the daemon asks for, and how long a shutdown may have to wait for it."""

import asyncio
import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from jeepney import Message, new_error, new_method_return

from fakes import ALICE, NOON, FakeClock
from goldens import mentions
from gpulease.domain import job as domain
from gpulease.domain.enforcement import AppliedEnforcement
from gpulease.domain.gpu import GpuUuid, JobId
from gpulease.domain.host_share import HostShare
from gpulease.domain.job import Exit, Invocation, Job
from gpulease.domain.lease import Claim, Lease
from gpulease.errors import LaunchDeferred, RecordUnwritable
from gpulease.host import scopes
from gpulease.host.job_runner import JobRunner, worker_exited
from gpulease.host.launch import Launch, LaunchContext
from gpulease.host.processes import ProcessTable
from gpulease.host.sandbox import Sandbox, UserSandbox, UvmNode
from gpulease.host.shim_control import has_scope, system_started_at
from gpulease.service.ports import WorkerExited, WorkerNews
from gpulease.shim.accounting import HostUse
from gpulease.shim.record import Exited, JobEvents, claim

FREEDESKTOP = "org.freedesktop.DBus.Error"

MIB, G = 1 << 20, 1 << 30
NOTHING = HostUse()
MINUTE, DAY = timedelta(minutes=1), timedelta(days=1)
TRUE = Invocation(argv=("true",), cwd="/", environment={})
ONE_GPU = (Lease(GpuUuid("GPU-0"), 1, NOON),)


class Noted:
    """A launcher that starts nothing, and a state directory that is always the same."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.launches: list[Launch] = []

    async def launch(self, launch: Launch) -> None:
        self.launches.append(launch)

    def job(self, job: int) -> Path:
        return self.path

    def ensure_jobs(self) -> None:
        pass


def launched(path: Path, wanted: timedelta | None, usual: timedelta) -> Launch:
    """Return what is launched for a job that asked for a grace, by a daemon with one of its own."""
    noted = Noted(path)
    workers = JobRunner(noted, None, noted, around(path), FakeClock())  # type: ignore[arg-type]
    workers.adopt(usual, 1, 0)
    job = Job(JobId(1), ALICE, "", "true", Claim(memory=1), NOON, leases=ONE_GPU, grace=wanted)
    asyncio.run(workers.launch(job, TRUE))
    return noted.launches[0]


def around(path: Path) -> LaunchContext:
    nothing = dict[Any, Any]()
    return LaunchContext(
        installation="x",
        secret="",
        as_other_users=False,
        simulated=True,
        driver=lambda: None,
        readings=lambda: nothing,
        hooks=path,
        grace=MINUTE,
        log_limit=1,
    )


@pytest.mark.parametrize(
    ("wanted", "usual", "told"),
    [(DAY, MINUTE, MINUTE), (MINUTE, DAY, MINUTE), (None, MINUTE, MINUTE), (None, DAY, DAY)],
)
def test_a_shutdown_waits_for_what_the_user_asked_for_but_no_longer_than_the_admin_says(
    tmp_path: Path, wanted: timedelta | None, usual: timedelta, told: timedelta
) -> None:
    launch = launched(tmp_path, wanted, usual)
    assert launch.sandbox is not None
    assert told < launch.sandbox.scope.grace < told + MINUTE, "and time for the record"
    assert launch.shim.grace_s == (wanted or usual).total_seconds(), (
        "a cancel waits as it was asked"
    )


def test_a_job_without_a_scope_runs_all_the_same_and_the_record_says_what_it_lacks(
    tmp_path: Path,
) -> None:
    noted: list[AppliedEnforcement] = []

    async def make(pid: int, scope: scopes.Scope) -> None:
        raise scopes.NoScope("no bus")

    async def note(job: JobId, enclosed: AppliedEnforcement) -> None:
        noted.append(enclosed)

    asyncio.run(Sandbox(lambda: None, note, make)(1, launched(tmp_path, None, MINUTE)))
    (enclosed,) = noted
    assert not enclosed.devices
    assert "scope" in enclosed.missing[0]
    assert not has_scope(tmp_path)


def test_a_shutdown_keeps_the_job_from_being_launched_rather_than_from_its_device_rules(
    tmp_path: Path,
) -> None:
    noted: list[AppliedEnforcement] = []

    async def make(pid: int, scope: scopes.Scope) -> None:
        raise scopes.NotNow("the machine is shutting down")

    async def note(job: JobId, enclosed: AppliedEnforcement) -> None:
        noted.append(enclosed)

    with pytest.raises(LaunchDeferred, match="the machine is shutting down"):
        asyncio.run(Sandbox(lambda: None, note, make)(1, launched(tmp_path, None, MINUTE)))
    assert noted == []


def command(path: Path, script: str) -> tuple[str, ...]:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path), "-u", "-c=0"


def test_the_node_that_cuda_needs_is_made_before_a_job_is_started(tmp_path: Path) -> None:
    node = tmp_path / "nvidia-uvm"
    make = command(tmp_path / "make", f'[ "$*" = "-u -c=0" ] && touch {node}')
    uvm = UvmNode(node, make, control := tmp_path / "nvidiactl")
    assert asyncio.run(uvm.obstacle()) is None
    assert not node.exists(), "where GPUs have other nodes there is nothing to wait for"
    control.touch()
    assert asyncio.run(uvm.obstacle()) is None
    assert node.exists()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (None, "{make}"),
        ("echo no module >&2; exit 1", "no module"),
    ],
)
def test_where_that_node_cannot_be_made_the_job_waits_and_nothing_is_opened_to_it(
    tmp_path: Path, script: str | None, said: str
) -> None:
    asked: list[scopes.Scope] = []

    async def make(pid: int, scope: scopes.Scope) -> None:
        asked.append(scope)

    async def note(job: JobId, enclosed: AppliedEnforcement) -> None:
        pass

    node, maker = tmp_path / "nvidia-uvm", tmp_path / "make"
    make_it = command(maker, script) if script else (str(maker), "-u", "-c=0")
    (control := tmp_path / "nvidiactl").touch()
    uvm = UvmNode(node, make_it, control)
    enclosure = Sandbox(lambda: None, note, make, uvm)
    launch = launched(tmp_path, None, MINUTE)
    assert launch.sandbox is not None
    scope = replace(launch.sandbox.scope, gpus=("/dev/nvidia0",))
    launch = replace(launch, sandbox=replace(launch.sandbox, scope=scope))
    with pytest.raises(LaunchDeferred) as deferred:
        asyncio.run(enclosure(1, launch))
    assert mentions(str(deferred.value), str(node), said.format(make=maker))
    assert asked == []

    # By hand, meanwhile.
    node.touch()
    asyncio.run(enclosure(1, launch))
    assert [scope.gpus for scope in asked] == [("/dev/nvidia0",)]


def test_a_record_that_cannot_be_written_keeps_the_job_from_being_launched(tmp_path: Path) -> None:
    async def make(pid: int, scope: scopes.Scope) -> None:
        pass

    async def note(job: JobId, enclosed: AppliedEnforcement) -> None:
        raise RecordUnwritable("the disk is full", "make room")

    launch = launched(tmp_path, None, MINUTE)
    with pytest.raises(RecordUnwritable):
        asyncio.run(Sandbox(lambda: None, note, make)(1, launch))
    with pytest.raises(RecordUnwritable):
        (tmp_path / "gone").mkdir()
        lost = launched(tmp_path / "gone", None, MINUTE)
        (tmp_path / "gone").rmdir()
        asyncio.run(Sandbox(lambda: None, note, make)(1, lost))


def _end_of(tmp_path: Path, code: int, used: HostUse = NOTHING) -> WorkerExited:
    """Return what the daemon learns of a job whose record has its start and its end."""
    directory = os.open(tmp_path, os.O_RDONLY)
    record = claim(directory, 9)
    os.close(directory)
    assert record is not None
    events = JobEvents(record)
    events.note_start(7)
    events.note_main_exit(code)
    events.note_end(used)
    events.write()
    record.close()
    noted = Noted(tmp_path)
    workers = JobRunner(noted, ProcessTable(), noted, around(tmp_path), FakeClock())  # type: ignore[arg-type]
    granted = Job(JobId(1), ALICE, "", "true", Claim(memory=1), NOON, leases=ONE_GPU)

    async def follow() -> list[WorkerNews]:
        return [news async for news in workers.follow(granted)]

    (news,) = asyncio.run(follow())
    assert isinstance(news, WorkerExited)
    return news


def test_start_and_end_of_a_short_job_are_one_news(tmp_path: Path) -> None:
    news = _end_of(tmp_path, 0)
    assert news.started is not None
    assert (news.exit, news.started.pid) == (Exit(0), 7)


def test_device_rules_deny_gpus_and_allow_what_gives_access_to_none(tmp_path: Path) -> None:
    devices = tmp_path / "devices"
    kinds = [
        "nvidia",
        "nvidia-caps",
        "nvidia-caps-imex-channels",
        "nvidia-fs",
        "nvidia-uvm",
        "fuse",
    ]
    lines = [f"{number} {kind}" for number, kind in enumerate(kinds, 500)]
    devices.write_text("\n".join(["Character devices:", *lines, "", "Block devices:", "8 sd"]))
    leased, missing = tmp_path / "nvidia0", tmp_path / "nvidia1"
    leased.touch()

    rules = dict(scopes.allowed([str(leased), str(missing)], devices))

    assert {each for each in rules if each.startswith("char-")} == {
        "char-fuse",
        "char-nvidia-fs",
        "char-nvidia-caps-imex-channels",
    }
    assert (rules[str(leased)], str(missing) in rules) == ("rw", False)


_OWN_LIMIT = (
    "exited with 1: it used all of its 192M of RAM, and the kernel killed 2 of its processes"
)
_MACHINE = (
    "ended by signal 9: the machine ran out of RAM, and the kernel killed one of its processes; "
    "the job used up to 300M"
)


@pytest.mark.parametrize(
    ("code", "used", "said"),
    [
        (1, HostUse(192 * MIB, 1.0, 2, 192 * MIB), _OWN_LIMIT),
        (-9, HostUse(300 * MIB, 1.0, 1), _MACHINE),
        (1, HostUse(300 * MIB, 1.0), None),
        # It started the killed one again, and has its result.
        (0, HostUse(192 * MIB, 1.0, 1, 192 * MIB), None),
    ],
)
def test_the_end_of_a_job_says_that_the_kernel_killed_processes_for_lack_of_ram(
    tmp_path: Path, code: int, used: HostUse, said: str | None
) -> None:
    news = _end_of(tmp_path, code, used)
    assert news.detail == said
    assert news.host_use == domain.HostUse(used.ram_peak, timedelta(seconds=1))
    assert news.ram_limit == used.ram_limit


def test_the_end_of_a_job_without_a_scope_has_its_cpu_and_nothing_that_was_not_counted(
    tmp_path: Path,
) -> None:
    news = _end_of(tmp_path, 0, HostUse(cpu_s=0.25))
    assert news.host_use == domain.HostUse(None, timedelta(seconds=0.25))


def test_an_end_by_sigterm_before_this_boot_is_one_by_a_shutdown() -> None:
    booted_at = datetime.fromtimestamp(system_started_at(), UTC)
    for before, by_shutdown in ((1, True), (-1, False)):
        ended = Exited("signaled", None, 15, booted_at - before * MINUTE, terminated=True)
        assert worker_exited(ended).by_shutdown is by_shutdown
        assert worker_exited(ended).interrupted


def test_leased_ram_and_cores_are_limits_of_the_scope_and_shares_are_none() -> None:
    share = HostShare(weight=400, protected=8 << 30)
    leased = scopes.Scope(7, "alice", MINUTE, ram=4 << 30, cores=(0, 9, 16), share=share)
    properties = dict(scopes._properties(11, leased))
    assert properties["MemoryMax"] == ("t", 4 << 30)
    assert properties["MemorySwapMax"] == ("t", 0)
    assert properties["AllowedCPUs"] == ("ay", bytes([0b1, 0b10, 0b1]))
    assert properties["CPUWeight"] == ("t", 400) and properties["MemoryLow"] == ("t", 8 << 30)

    others = dict(scopes._properties(11, scopes.Scope(7, "alice", MINUTE, share=share)))
    limits = {"MemoryMax", "MemorySwapMax", "AllowedCPUs", "CPUQuotaPerSecUSec", "MemoryHigh"}
    assert not limits & others.keys()
    assert others["CPUWeight"] == ("t", 400)


class OldSystemd:
    """A bus on which systemd refuses the properties of units that it does not know."""

    def __init__(self, *unknown: str) -> None:
        self.unknown = unknown
        self.asked: list[list[str]] = []

    async def send_and_get_reply(self, request: Message) -> Message:
        names = [name for name, _ in request.body[2]]
        self.asked.append(names)
        request.header.serial = len(self.asked)
        if found := next((name for name in names if name in self.unknown), None):
            text = f"Cannot set property {found}, or unknown property."
            return new_error(request, f"{FREEDESKTOP}.PropertyReadOnly", "s", (text,))
        return new_method_return(request, "o", ("/job",))


def test_a_systemd_that_knows_no_oom_policy_of_scopes_is_asked_without() -> None:
    bus = OldSystemd("OOMPolicy")
    scope = scopes.Scope(7, "alice", MINUTE)
    asyncio.run(scopes._request_start(bus, 9, scope))  # type: ignore[arg-type]
    first, second = bus.asked
    assert [name for name in first if name not in second] == ["OOMPolicy"]


@pytest.mark.parametrize("refused", [None, scopes.NoScope("no"), scopes.NotNow("not now")])
def test_a_user_without_root_gets_scopes_that_hold_ram_alone(
    tmp_path: Path, refused: Exception | None
) -> None:
    made: list[tuple[int, scopes.Scope, str]] = []

    async def make(pid: int, scope: scopes.Scope, bus: str) -> None:
        made.append((pid, scope, bus))
        if refused is not None:
            raise refused

    noted = Noted(tmp_path)
    own = replace(around(tmp_path), needs_sandbox=lambda job: job.claim.ram is not None)
    workers = JobRunner(noted, None, noted, own, FakeClock())  # type: ignore[arg-type]
    job = Job(JobId(1), ALICE, "", "true", Claim(1, ram=G, cpus=1), NOON, leases=ONE_GPU)
    asyncio.run(workers.launch(job, TRUE))
    # A scope that cannot be made is no reason not to start: the shim watches.
    asyncio.run(UserSandbox("unix:path=/bus", make)(7, noted.launches[0]))
    ((pid, scope, bus),) = made
    assert (pid, scope.ram, scope.cores, bus) == (7, G, (), "unix:path=/bus")
    assert noted.launches[0].shim.cores

    without = replace(job, claim=Claim(memory=1))
    asyncio.run(workers.launch(without, TRUE))
    assert noted.launches[1].sandbox is None
