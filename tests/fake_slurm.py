"""A Slurm made of plain values, which a test may change; it understands the daemon's commands."""

from dataclasses import dataclass, field

from gpulease.errors import SlurmFailed


@dataclass
class FakeJob:
    """A job, as squeue shows it."""

    label: str
    state: str = "RUNNING"
    nodes: str = "n1"
    wanted: str = ""
    excluded: str = "(null)"
    comment: str = "(null)"
    restarts: int = 0
    is_batch: bool = True
    start: str = ""
    exit_code: str = "0"
    actions: list[str] = field(default_factory=list)
    """What was done with it: requeue, scancel, ..."""


class FakeSlurm:
    """Runs commands like `slurm.node.commands.run_slurm`."""

    def __init__(self, *others: str) -> None:
        """`others` are the nodes beside n1."""
        self.jobs: dict[int, FakeJob] = {}
        self.nodes = ("n1", *others)
        self.node: dict[str, str] = {"State": "IDLE"}
        """The fields of n1."""
        self.config = ""
        self.is_away = False
        self.commands: list[tuple[str, ...]] = []

    async def __call__(self, *argv: str, deadline: float = 10) -> str:
        self.commands.append(argv)
        if self.is_away:
            raise SlurmFailed(f"cannot ask Slurm: {argv[0]} did not answer")
        if argv[0] == "squeue":
            return self._squeue(argv[1:])
        if argv[0] == "sinfo":
            return "".join(f"{name}|gpu:2,shard:192\n" for name in self.nodes)
        if argv[0] == "scancel":
            self._job(argv[1]).actions.append("scancel")
            return ""
        return self._scontrol(*argv[1:])

    def _squeue(self, options: tuple[str, ...]) -> str:
        given = dict(each.lstrip("-").partition("=")[::2] for each in options)
        if given.get("states") == "PENDING":
            waiting = [(number, job) for number, job in self.jobs.items() if job.state == "PENDING"]
            return "".join(f"{number}|{job.comment}\n" for number, job in waiting)
        if "jobs" not in given:
            running = (number for number, job in self.jobs.items() if job.state == "RUNNING")
            return "".join(f"{number}\n" for number in running)
        number = int(given["jobs"])
        if number not in self.jobs:
            raise SlurmFailed("Slurm refused `squeue`: Invalid job id specified")
        job = self.jobs[number]
        values = {
            "JobID": str(number), "State": job.state, "UserID": "47201", "GroupID": "47201",
            "RestartCnt": str(job.restarts), "NodeList": job.nodes, "ReqNodes": job.wanted,
            "Partition": "main", "BatchFlag": str(int(job.is_batch)), "admin_comment": job.comment,
            "exit_code": job.exit_code,
        }  # fmt: skip
        if "Format" in given:
            names = [each.partition(":")[0] for each in given["Format"].split(",")]
            return "|".join(values[name] for name in names) + "\n"
        text = given["format"]
        for name, value in (("%A", str(number)), ("%i", job.label), ("%x", job.excluded)):
            text = text.replace(name, value)
        return text + "\n"

    def _scontrol(self, verb: str, *rest: str) -> str:
        if verb == "--oneliner":
            return " ".join(["NodeName=n1", *(f"{key}={it}" for key, it in self.node.items())])
        if verb == "show":
            return self.config
        if verb == "update" and rest[0].startswith("nodename="):
            self._update_node(dict(each.split("=", 1) for each in rest[1:]))
        elif verb == "update":
            self._update_job(self._job(rest[0].partition("=")[2]), rest[1:])
        else:
            job = self._job(rest[0])
            job.actions.append(verb)
            job.state = "PENDING" if verb.startswith("requeue") else job.state
        return ""

    def _update_node(self, changes: dict[str, str]) -> None:
        state = changes.pop("state", None)
        if state is not None:
            self.node["State"] = {"drain": "IDLE+DRAIN", "undrain": "IDLE"}[state]
        if state == "undrain":
            self.node.pop("Reason", None)
        self.node |= {key.capitalize(): value for key, value in changes.items()}

    def _update_job(self, job: FakeJob, changes: tuple[str, ...]) -> None:
        for key, value in (each.split("=", 1) for each in changes):
            if key == "admincomment":
                job.comment = value
            elif job.state != "PENDING":
                raise SlurmFailed("Slurm refused `scontrol`: Job is no longer pending execution")
            elif key == "excnodelist":
                job.excluded = value
            else:
                job.start = value

    def _job(self, label: str) -> FakeJob:
        return next(job for job in self.jobs.values() if job.label == label)
