"""A job's limit by the driver is there before its first process, and goes before its cgroup.

Real cgroups, made by hand in the place of systemd; the real launcher; the driver's ABI.
"""

import json
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import cgroup_by_hand as by_hand
from fakes import ALICE, NOON, reading
from gpulease.domain.enforcement import AppliedEnforcement, with_driver_limits
from gpulease.domain.gpu import GpuUuid, JobId
from gpulease.domain.job import Invocation, Job
from gpulease.domain.lease import Claim, Lease, State
from gpulease.errors import RecordUnwritable
from gpulease.host import cgroups, scopes
from gpulease.host.enforcement import LimitRemoval, LimitRestore
from gpulease.host.launch import LaunchContext, launch_of
from gpulease.host.launcher import Launcher
from gpulease.host.sandbox import Sandbox
from gpulease.host.shim_control import has_scope
from gpulease.service.ports import NotLimited
from gpulease.shim.record import read_record
from gpulease.worker.environment import HOOKS
from gpulease.worker.overhead import default_overhead
from nvml_stand_in import HANG, Card, Code, ProbeProcess, StandIn
from process_rig import end, output, run, shell, wait_until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes cgroups")

G = 1024**3
FIRST, SECOND = (GpuUuid(StandIn.uuid(index)) for index in (0, 1))


class Limiter:
    """DriverLimits in a process of its own, as the driver's library is loaded but once."""

    def __init__(self, probe: ProbeProcess) -> None:
        self._probe = probe
        self._one_at_a_time = threading.Lock()

    def _ask(self, verb: str, *arguments: object) -> Any:
        with self._one_at_a_time:
            return self._probe.limits(verb, *arguments)

    def why_unavailable(self, gpu: GpuUuid, cgroup: Path) -> str | None:
        said: str | None = self._ask("obstacle", gpu, cgroup)
        return said

    def set_limit(self, gpu: GpuUuid, cgroup: Path, memory: int) -> int:
        return self._number(self._ask("limit", gpu, cgroup, memory))

    def current_limit(self, gpu: GpuUuid, cgroup: Path) -> int | None:
        said = self._ask("kept", gpu, cgroup)
        return None if said is None else self._number(said)

    def remove_limit(self, gpu: GpuUuid, cgroup: Path) -> None:
        if (said := self._ask("lift", gpu, cgroup)) is not None:
            raise NotLimited(said)

    def _number(self, answer: object) -> int:
        if not isinstance(answer, int):
            raise NotLimited(str(answer))
        return answer


class Rig:
    """A driver, a scope that is made when asked for, and what was noted of each launch."""

    def __init__(self, stand_in: StandIn, probe: ProbeProcess, job: int, scope: Path) -> None:
        self.stand_in, self.job, self.scope = stand_in, job, scope
        self.noted: list[AppliedEnforcement] = []
        self.limiter = Limiter(probe)

    async def make(self, pid: int, scope: scopes.Scope) -> None:
        by_hand.put(pid, self.scope)

    async def note(self, job: JobId, enclosed: AppliedEnforcement) -> None:
        self.noted.append(enclosed)

    def lease(
        self,
        directory: Path,
        memory: dict[GpuUuid, int],
        bound: int | None = None,
        **variables: str,
    ) -> Any:
        """Launch a job with leases as the daemon does; return what it found in its environment."""
        cards = {uuid: reading(uuid, total=80 * G) for uuid in (FIRST, SECOND)}
        around = LaunchContext(
            installation="x",
            secret="",
            as_other_users=False,
            simulated=False,
            driver=lambda: "615.10",
            readings=lambda: cards,
            hooks=HOOKS,
            grace=timedelta(seconds=30),
            log_limit=1 << 20,
        )
        leases = tuple(Lease(uuid, size, NOON, memory_bound=bound) for uuid, size in memory.items())
        claim = Claim(memory=max(memory.values()), gpus=len(memory))
        job = Job(JobId(self.job), ALICE, "", "env", claim, NOON, leases=leases)
        invocation = Invocation(argv=("/usr/bin/env",), cwd="/", environment=variables)
        made = launch_of(job, invocation, directory, around)

        async def scenario() -> None:
            launcher = Launcher(sandbox=Sandbox(lambda: self.limiter, self.note, self.make))
            await launcher.launch(made)
            await launcher.close()

        run(scenario())
        assert end(directory).exit_code == 0
        return dict(line.split("=", 1) for line in output(directory).splitlines())

    def launch(
        self, directory: Path, script: str, memory: dict[GpuUuid, int]
    ) -> AppliedEnforcement:
        launch = shell(directory, script, job=self.job, memory=memory)

        async def scenario() -> None:
            enclosure = Sandbox(lambda: self.limiter, self.note, self.make)
            launcher = Launcher(sandbox=enclosure)
            await launcher.launch(launch)
            await launcher.close()

        run(scenario())
        return self.noted[-1]

    def limits(self) -> dict[str, int]:
        return {
            uuid: hard
            for (uuid, path), (_, hard) in self.stand_in.limits().items()
            if path == str(self.scope)
        }


@pytest.fixture
def rig(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Rig]:
    """Yield a driver, whose calls may take as long as a test says."""
    stand_in = StandIn(tmp_path, gpus=[Card(), Card()], driver="615.10")
    with (
        by_hand.scope() as (job, path),
        ProbeProcess(stand_in.environment(), deadline=getattr(request, "param", 60.0)) as probe,
    ):
        yield Rig(stand_in, probe, job, path)


def limits_file(rig: Rig) -> Path:
    return Path(rig.stand_in.environment()["NVML_STAND_IN"]).with_name("limits")


def test_the_limits_are_there_before_the_first_process_and_are_noted_as_the_driver_has_them(
    rig: Rig, directory: Path
) -> None:
    script = f"cat {limits_file(rig)}; cat /proc/self/cgroup"
    enclosed = rig.launch(directory, script, {FIRST: 3 * G - 1, SECOND: 4 * G})
    end(directory)
    kept = {FIRST: 3 * G - 256 * 1024**2, SECOND: 4 * G}
    assert enclosed == AppliedEnforcement(limits=kept)
    seen = output(directory)
    for uuid, limit in kept.items():
        assert f"{uuid} 0 {limit} {rig.scope}" in seen.splitlines()
    assert f"0::/gpulease.slice/{rig.scope.name}" in seen.splitlines()


def test_a_job_with_a_range_is_limited_to_its_bound(rig: Rig, directory: Path) -> None:
    found = rig.lease(directory, {FIRST: 4 * G}, bound=6 * G)

    assert rig.limits() == {FIRST: 6 * G}
    (gpu,) = json.loads(found["GPULEASE_HOOK"])["gpus"]
    pool = 6 * G - default_overhead("jax", 1, driver="615.10")
    assert (gpu["memory"], gpu["whole"], gpu["pools"]["jax"]) == (6 * G, 6 * G, pool)
    assert found["GPULEASE_MEMORY"] == str(6 * G)
    assert found["GPULEASE_MEMORY_GUARANTEED"] == str(4 * G)


def test_where_the_driver_limits_a_job_its_shares_are_of_the_limit(
    rig: Rig, directory: Path
) -> None:
    """CUDA shows it the limit as all that the GPU has: 0.02 of 4 GiB would be no pool at all."""
    found = rig.lease(directory, {FIRST: 4 * G})

    pool = 4 * G - default_overhead("jax", 1, driver="615.10")
    assert rig.limits() == {FIRST: 4 * G}
    assert float(found["XLA_PYTHON_CLIENT_MEM_FRACTION"]) == pytest.approx(pool / (4 * G), abs=1e-5)
    assert found["GPULEASE_MEMORY_FRACTION"] == "1.000000"
    (gpu,) = json.loads(found["GPULEASE_HOOK"])["gpus"]
    assert (gpu["memory"], gpu["total"], gpu["pools"]["jax"]) == (4 * G, 4 * G, pool)


def test_on_a_gpu_that_the_driver_does_not_limit_shares_are_of_all_of_it(
    rig: Rig, directory: Path
) -> None:
    rig.stand_in.change(0, faults={"nvmlDeviceSetMemoryLimits_v1": Code.NO_PERMISSION})
    found = rig.lease(directory, {FIRST: 4 * G, SECOND: 4 * G}, KEPT="as it was")

    totals = [gpu["total"] for gpu in json.loads(found["GPULEASE_HOOK"])["gpus"]]
    assert totals == [80 * G, 4 * G]
    assert found["GPULEASE_MEMORY_FRACTION"] == "0.050000"
    assert found["KEPT"] == "as it was"


@pytest.mark.parametrize("rig", [1.0], indirect=True)
def test_a_driver_that_hangs_holds_no_launch_up_for_ever(rig: Rig, directory: Path) -> None:
    rig.stand_in.change(0, delays={"nvmlDeviceSetMemoryLimits_v1": HANG})
    enclosed = rig.launch(directory, "exit 3", {FIRST: G})
    assert end(directory).exit_code == 3
    assert enclosed.limits == {}
    assert FIRST[:12] in enclosed.missing[0]
    rig.stand_in.change(0, delays={})


def test_the_limits_of_an_ended_job_are_lifted_while_its_cgroup_is_there(
    rig: Rig, directory: Path
) -> None:
    rig.launch(directory, "true", {FIRST: G})
    end(directory)
    wait_until(lambda: not cgroups.members(rig.job), "the scope is empty")
    assert rig.limits() == {FIRST: G}
    other = LimitRemoval(rig.limiter, lambda job: False)
    run(other.of(JobId(rig.job), [FIRST]))
    assert rig.limits() == {FIRST: G}, "the scope of another daemon"
    run(LimitRemoval(rig.limiter, lambda job: has_scope(directory)).of(JobId(rig.job), [FIRST]))
    assert rig.limits() == {}


def test_what_ended_while_no_daemon_was_there_is_lifted_and_what_lives_is_not(
    rig: Rig, directory: Path
) -> None:
    rig.launch(directory, "sleep 1000", {FIRST: G})
    lifting = LimitRemoval(rig.limiter, lambda job: job == rig.job)
    run(lifting.of_all_but({JobId(rig.job)}, [FIRST, SECOND]))
    assert rig.limits() == {FIRST: G}
    run(lifting.of_all_but(set(), [FIRST, SECOND]))
    assert rig.limits() == {}


def test_a_limit_that_cannot_be_lifted_is_said_once_for_each_gpu(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    rig.stand_in.change(0, faults={"nvmlDeviceGetMemoryLimits_v1": Code.UNKNOWN})
    lifting = LimitRemoval(rig.limiter, lambda _: True)
    for _ in range(20):
        run(lifting.of(JobId(rig.job), [FIRST, SECOND]))
    (line,) = [each.getMessage() for each in caplog.records]
    assert FIRST[:12] in line


def test_a_launch_that_cannot_be_noted_leaves_no_limit_behind(rig: Rig, directory: Path) -> None:
    async def refuse(job: JobId, enclosed: AppliedEnforcement) -> None:
        assert rig.limits() == {FIRST: G}
        raise RecordUnwritable("the disk is full", "make room")

    async def scenario() -> None:
        launcher = Launcher(sandbox=Sandbox(lambda: rig.limiter, refuse, rig.make))
        with pytest.raises(RecordUnwritable):
            await launcher.launch(shell(directory, "true", job=rig.job, memory={FIRST: G}))
        await launcher.close()

    run(scenario())
    assert rig.limits() == {}
    assert read_record(directory) is None, "so that it can be launched again"


class Renewed:
    """What a daemon that comes back finds out about a running job, notes and tells."""

    def __init__(self, rig: Rig, kept: dict[GpuUuid, int | None]) -> None:
        self.noted: list[tuple[Mapping[GpuUuid, int | None], str]] = []
        self.told: list[str] = []
        leases = tuple(
            Lease(gpu, 3 * G, NOON, enforced_by=("driver", "watch"), driver_limit=limit)
            for gpu, limit in kept.items()
        )
        claim = Claim(memory=3 * G)
        job = Job(JobId(rig.job), ALICE, "", "x", claim, NOON, State.ACTIVE, leases=leases)
        self.job = job
        run(LimitRestore(rig.limiter, lambda _: True, self._note).of([job], self._tell))

    async def _note(self, job: JobId, limits: Mapping[GpuUuid, int | None], said: str) -> None:
        self.noted.append((limits, said))
        self.job = with_driver_limits(self.job, limits)

    async def _tell(self, job: JobId, said: str) -> None:
        self.told.append(said)

    @property
    def rungs(self) -> list[tuple[str, ...] | None]:
        return [lease.enforced_by for lease in self.job.leases]


def test_a_daemon_that_comes_back_leaves_limits_that_stand_and_sets_those_again_that_do_not(
    rig: Rig, directory: Path
) -> None:
    rig.launch(directory, "sleep 1000", {FIRST: 3 * G, SECOND: 3 * G})
    assert Renewed(rig, {FIRST: 3 * G, SECOND: 3 * G}).noted == []
    rig.limiter.remove_limit(SECOND, rig.scope)
    found = Renewed(rig, {FIRST: 3 * G, SECOND: 3 * G})
    assert rig.limits() == {FIRST: 3 * G, SECOND: 3 * G}
    ((limits, said),) = found.noted
    assert (limits, found.told) == ({SECOND: 3 * G}, [])
    assert SECOND in said or "GPU" in said
    assert found.rungs == [("driver", "watch")] * 2


def test_a_job_that_the_driver_limits_no_more_says_so_and_one_that_nobody_can_tell_of_does_not(
    rig: Rig, directory: Path
) -> None:
    rig.launch(directory, "sleep 1000", {FIRST: 3 * G})
    rig.limiter.remove_limit(FIRST, rig.scope)
    rig.stand_in.change(0, step=0)
    rig.stand_in.change(1, faults={"nvmlDeviceGetMemoryLimits_v1": Code.UNKNOWN})
    found = Renewed(rig, {FIRST: 3 * G, SECOND: 3 * G})
    ((limits, said),) = found.noted
    assert (limits, found.told) == ({FIRST: None}, [said])
    assert said
    assert found.rungs == [("watch",), ("driver", "watch")]
    assert [lease.driver_limit for lease in found.job.leases] == [None, 3 * G]
    by_hand.kill_and_remove(rig.scope)
    assert Renewed(rig, {FIRST: 3 * G}).noted == [], "it has ended meanwhile"
    rig.scope.mkdir()


def test_device_rules_that_nobody_attached_are_not_in_force(rig: Rig) -> None:
    assert scopes.has_device_rules(rig.scope) is not True
    assert scopes.has_device_rules(rig.scope / "none") is None
    assert scopes.kernel_has_device_rules(rig.scope) is not False
