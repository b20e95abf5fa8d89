"""The options and arguments that verbs share: how each is written, and its help."""

from functools import partial
from typing import Annotated, Literal

import typer

_option = partial(typer.Option, show_default=False)
_resource = partial(_option, rich_help_panel="Resources")
_waiting = partial(_option, rich_help_panel="Waiting")
_job = partial(_option, rich_help_panel="Job")
_terminal = partial(_option, rich_help_panel="Terminal")
_framework = partial(_option, rich_help_panel="Frameworks")

# What names jobs; job_selection finds them.

JobsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="JOB",
        help="Numbers or names: 17, 3-7, 17_3 (an element of array 17), 'last' (your newest).",
        show_default=False,
    ),
]
NamePatternOption = Annotated[
    str | None,
    _option("-n", "--name", metavar="PATTERN", help="Your jobs with such names, as 'sweep*'."),
]
AllOption = Annotated[bool, _option("-a", "--all", help="All your jobs that wait or run.")]

# Of run and hold.

MemOption = Annotated[
    str | None, _resource("--mem", metavar="SIZE", help="Memory on each GPU: 4G, 4096M, 40%.")
]
GpusOption = Annotated[
    int | None, _resource("--gpus", metavar="N", help="Number of GPUs; default: 1.")
]
GpuOption = Annotated[
    list[str] | None,
    _resource("--gpu", metavar="GPU", help="Only these: 1,3, UUIDs; all of them unless --gpus."),
]
GpuModelOption = Annotated[
    str | None, _resource("--gpu-model", metavar="MODEL", help="Only GPUs of this model: A100.")
]
MinVramOption = Annotated[
    str | None, _resource("--min-vram", metavar="SIZE", help="Only GPUs of this size or larger.")
]
SameModelOption = Annotated[bool, _resource("--same-model", help="With --gpus: all of one model.")]
ExclusiveOption = Annotated[bool, _resource("--exclusive", help="No other job on these GPUs.")]
TimeOption = Annotated[
    str | None, _resource("--time", metavar="SPAN", help="Time limit: 90s, 30m, 4h, 1d12h.")
]
SignalOption = Annotated[
    str | None,
    _resource("--signal", metavar="SIG@SPAN", help="Send SIG this long before the time limit."),
]
GraceOption = Annotated[
    str | None, _resource("--grace", metavar="SPAN", help="Time between SIGTERM and SIGKILL.")
]
NewLeaseOption = Annotated[
    bool, _resource("--new-lease", help="Inside a job: take a second lease.")
]
DetachOption = Annotated[
    bool, _waiting("-d", "--detach", help="Print the number of the job and return.")
]
NoWaitOption = Annotated[
    bool, _waiting("--no-wait", help="Give up (exit 75) if the job cannot start at once.")
]
WaitOption = Annotated[
    str | None, _waiting("--wait", metavar="SPAN", help="Give up (exit 75) after this time.")
]
RetryOomOption = Annotated[
    str | None,
    _waiting(
        "--retry-oom",
        metavar="FACTOR",
        help="Out of GPU memory: run again with more, as 1.5x; up to 4x in all.",
    ),
]
ArrayOption = Annotated[
    str | None,
    _waiting(
        "--array", metavar="INDICES", help="A job for each index: 0-99, 1,3,5; %8: 8 at once."
    ),
]
AfterOption = Annotated[
    list[str] | None,
    _waiting(
        "--after", metavar="JOB", help="Start when JOB has succeeded; also JOB:fail, JOB:any."
    ),
]
BeginOption = Annotated[
    str | None,
    _waiting("--begin", metavar="TIME", help="Do not start before: 22:00, +2h, or an instant."),
]
HeldOption = Annotated[bool, _waiting("--held", help="Do not start until gpulease edit --no-held.")]
RequeueOption = Annotated[
    bool, _waiting("--requeue", help="The machine failed: queue the job again.")
]
PreemptibleOption = Annotated[
    bool,
    _waiting("--preemptible", help="Use idle memory; stop and queue again if others need it."),
]
PriorityOption = Annotated[
    Literal["low", "normal", "high"],
    _waiting("--priority", help="Class in the queue; default: normal. high: for admins."),
]
NiceOption = Annotated[
    int,
    _waiting("--nice", metavar="N", help="0 to 19: start later within the class; admins: -20."),
]
SlurmOption = Annotated[
    list[str] | None,
    _waiting(
        "--slurm",
        metavar="OPTIONS",
        help="On a cluster: options for srun and sbatch, as '-p long -w gpu2'.",
    ),
]
SnapshotOption = Annotated[
    bool,
    _waiting("--snapshot", help="Run the script as it is now, even if it is edited meanwhile."),
]
DryRunOption = Annotated[
    bool,
    _waiting("--dry-run", help="Say when it would start, and submit nothing; exit 75: not now."),
]
RunJsonOption = Annotated[bool, _waiting("--json", help="With --dry-run: print JSON.")]
EndWithCommandOption = Annotated[
    bool,
    _job("--end-with-command", help="End the job when this command ends, also if it is killed."),
]
NameOption = Annotated[
    str | None, _job("--name", metavar="TEXT", help="Name in listings; default: the command's.")
]
ShellOption = Annotated[bool, _job("--shell", help="Run your shell in place of COMMAND.")]
PtyOption = Annotated[
    bool | None,
    _terminal(
        "--pty/--no-pty",
        help="Give the job a terminal, or none; default: if you are on a terminal.",
    ),
]
DetachKeysOption = Annotated[
    str | None,
    _terminal("--detach-keys", metavar="KEYS", help=r"Keys that leave the job running: ctrl-\,d."),
]
VisibleOption = Annotated[
    Literal["uuid", "index"],
    _framework("--visible", help="How CUDA_VISIBLE_DEVICES names GPUs; default: uuid."),
]
GrowthOption = Annotated[
    bool, _framework("--growth", help="TensorFlow and JAX allocate memory as needed.")
]
SplitOption = Annotated[
    str | None,
    _framework(
        "--split",
        metavar="N|SIZES",
        help="TensorFlow sees each GPU as N logical GPUs, or as some of these sizes: 1G,2G.",
    ),
]
ProcessesOption = Annotated[
    int | None,
    _framework(
        "--processes",
        metavar="N",
        help="Divide the memory of the job equally between N processes that use its GPUs.",
    ),
]
DeterministicOption = Annotated[
    bool, _framework("--deterministic", help="Frameworks use deterministic operations.")
]
OmpThreadsOption = Annotated[
    int | None,
    _framework("--omp-threads", metavar="N", help="Threads of OpenMP, MKL, OpenBLAS, NumExpr."),
]
InterOpThreadsOption = Annotated[
    int | None,
    _framework("--inter-op-threads", metavar="N", help="TensorFlow's threads between operations."),
]
IntraOpThreadsOption = Annotated[
    int | None,
    _framework("--intra-op-threads", metavar="N", help="TensorFlow's threads in an operation."),
]
SoftPlacementOption = Annotated[
    bool,
    _framework("--soft-placement", help="TensorFlow runs operations without a GPU kernel on CPU."),
]
LogPlacementOption = Annotated[
    bool, _framework("--log-placement", help="TensorFlow logs the device of each operation.")
]
StrictOption = Annotated[
    bool,
    _framework("--strict", help="Exit with 97 if a framework cannot be limited to the lease."),
]
VerboseOption = Annotated[
    bool, _job("--verbose", help="Say which GPU each device name of the frameworks is.")
]
SummaryOption = Annotated[
    bool,
    _job("--summary", help="At the end, say what the job used: peaks, utilization, steps."),
]
NotifyOption = Annotated[
    list[str] | None,
    _job(
        "--notify",
        metavar="EVENTS",
        help="Notify you: start, end, fail, oom, over-lease, time-left, all; none.",
    ),
]
NoDefaultsOption = Annotated[
    bool,
    _option("--no-defaults", help="Ignore [run] in your configuration and GPULEASE_RUN_OPTIONS."),
]
