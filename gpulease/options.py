"""The options of `gpulease run`, and of what takes some of them. Each stands here once.

`hold`, `edit`, the table [run] of the user's file and `gpulease.lease` take some of them too. The
declarations for typer, the quick parser, completion, the request and the names in errors are
derived from `OPTIONS`. What the option does, and which values are in range, the daemon knows.

The command imports this at every start of `run`.
"""

from __future__ import annotations

from gpulease.errors import BadValue
from gpulease.record import record
from gpulease.units import Share, parse_memory_range, parse_size, parse_span, parse_split

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from datetime import timedelta
    from typing import Any, Literal


@record(frozen=True)
class Option:
    """How an option is written, what it sets, and where it is valid besides `run`."""

    flags: tuple[str, ...]
    help: str
    panel: str
    """The heading of the help under which it stands."""
    default: Any = None
    metavar: str | None = None
    fields: tuple[str, ...] = ()
    """The fields of a submission that it sets, such as claim.memory; none: it is the command's."""
    reads: Callable[[Any], Any] | None = None
    """Turns its value, also None, into that of the field, or into one for each of the fields."""
    python: str | None = None
    """The argument of `gpulease.lease`."""
    holds: bool = False
    """Whether `hold` has it."""
    edits: str | None = None
    """The help of `edit`, where None leaves the value as it is; None: `edit` does not have it."""
    clears: tuple[str, Any] | None = None
    """A word after which `edit` takes the value away, and the field's value then."""
    is_typed_only: bool = False
    """It changes what the command does, so that a default in [run] would surprise."""
    is_of_new_jobs: bool = False
    """It has no effect on a command that runs within the lease of a job."""
    annotation: str = ""
    """Its type, as `RunOptions` has it."""

    @property
    def long(self) -> str:
        """The option as messages name it: --mem."""
        return self.flags[-1].partition("/")[0]

    @property
    def choices(self) -> tuple[str, ...]:
        """The values that it accepts; none if it accepts any, or is a flag."""
        return tuple(self.annotation.split("'")[1::2])

    @property
    def is_flag(self) -> bool:
        """Whether it takes no value."""
        return self.annotation.startswith("bool")

    @property
    def is_list(self) -> bool:
        """Whether it may be given several times."""
        return self.annotation.startswith("Sequence")


def _option(*flags: str, help: str, **columns: Any) -> Any:
    return Option(flags, help, **columns)


def _resource(*flags: str, **columns: Any) -> Any:
    return _option(*flags, panel="Resources", **columns)


def _waiting(*flags: str, **columns: Any) -> Any:
    return _option(*flags, panel="Waiting", **columns)


def _job(*flags: str, **columns: Any) -> Any:
    return _option(*flags, panel="Job", **columns)


def _framework(*flags: str, **columns: Any) -> Any:
    return _option(*flags, panel="Frameworks", **columns)


_LONGEST = 100
"""Digits of a number: int() fails from 4,301 on, and a float is infinite from 309 on."""


# What readers accept is wider than what can be typed: gpulease.lease takes numbers and timedeltas.
def _memory_range(memory: str | int | None) -> tuple[int | float | None, ...]:
    """Return the guarantee and the bound, each as bytes and as a share in percent."""
    ends = parse_memory_range(memory) if isinstance(memory, str) else (_bytes(memory), None)
    found: list[int | float | None] = []
    for end in ends:
        found += (None, float(end.percent)) if isinstance(end, Share) else (end, None)
    return tuple(found)


def _size(size: str | int | None) -> int | None:
    return parse_size(size) if isinstance(size, str) else _bytes(size)


def _bytes(memory: int | None) -> int | None:
    if memory is not None and memory < 2**20:
        raise BadValue(
            f"cannot lease {memory} bytes: a number is read as bytes",
            f'did you mean "{memory}G"?' if 0 < memory < 1024 else 'write a size as "4G"',
        )
    return memory


def _count(number: str | int | None) -> int | None:
    if isinstance(number, str) and not (
        number.isascii() and number.removeprefix("-").isdecimal() and len(number) <= _LONGEST
    ):
        raise BadValue(f"cannot read {number[:40]!r}: it is not a whole number")
    return None if number is None else int(number)


def seconds(span: str | float | timedelta | None) -> float | None:
    """Return a span in seconds; None stays None.

    Raises:
        BadValue: it is not a span, or is negative.
    """
    if span is None:
        return None
    if isinstance(span, str):
        return parse_span(span).total_seconds()
    amount = float(span) if isinstance(span, int | float) else span.total_seconds()
    if not 0 <= amount < float("inf"):
        raise BadValue(
            f"cannot use the time {span!r}: it must be finite and not negative",
            'write seconds, "30m" or a timedelta; None means without limit',
        )
    return amount


def delay(span: str | float | timedelta | None) -> float | None:
    """Return a span that may be "0s" in seconds; None stays None.

    Raises:
        BadValue: as `seconds`.
    """
    if isinstance(span, str):
        return parse_span(span, may_be_zero=True).total_seconds()
    return seconds(span)


def gpu_names(given: str | int | Sequence[str | int] | None) -> list[str]:
    """Return names of GPUs, also several with commas, as "1,3", each once.

    Raises:
        BadValue: one is empty.
    """
    each = [given] if isinstance(given, str | int) else given or ()
    names = [name.strip() for word in each for name in str(word).split(",")]
    if not all(names):
        raise BadValue(
            "cannot use --gpu: a GPU is missing", "such as --gpu 1,3; gpulease status shows them"
        )
    return list(dict.fromkeys(names))


def listed_events(given: Sequence[str]) -> list[str]:
    """Return the events in --notify start,end --notify oom; none with --notify none."""
    events = [event.strip() for each in given for event in each.split(",")]
    return [] if "none" in events else events


def exit_codes(given: Sequence[str | int]) -> list[int]:
    """Return the exit codes in --retry-on 75,137, each once.

    Raises:
        BadValue: one is no number.
    """
    words = [word.strip() for each in given for word in str(each).split(",")]
    for word in words:
        if not (word.isascii() and word.isdecimal() and len(word) <= _LONGEST):
            raise BadValue(
                f"cannot use --retry-on: {word[:40]!r} is no exit code",
                "such as --retry-on 75,137; after a signal it is 128 and the number of the signal",
            )
    return list(dict.fromkeys(map(int, words)))


def grid_values(given: Sequence[str]) -> dict[str, list[str]]:
    """Return the values by names that --grid lr=1e-3,1e-4 --grid seed=0-4 gives.

    Raises:
        BadValue: one is not NAME=VALUES, or a name is given twice.
    """
    found: dict[str, list[str]] = {}
    for text in given:
        name, equals, values = text.partition("=")
        each = [value for word in values.split(",") for value in _range(word)]
        if not (equals and name.isascii() and name.isidentifier() and all(each)) or name in found:
            why = "it is there twice" if name in found else "it is not NAME=VALUE,VALUE"
            raise BadValue(
                f"cannot use --grid {text[:60]}: {why}", "--grid lr=1e-3,1e-4 --grid seed=0-4"
            )
        found[name] = each
    return found


def _range(word: str) -> Sequence[str]:
    """Return the numbers of 0-4; another word is one value."""
    first, dash, last = word.partition("-")
    are_numbers = dash and first.isdecimal() and last.isdecimal() and word.isascii()
    if not are_numbers or len(last) > _MOST_DIGITS or int(first) > int(last):
        return [word]
    return list(map(str, range(int(first), min(int(last), int(first) + _MOST_VALUES) + 1)))


_MOST_DIGITS, _MOST_VALUES = 9, 10_000


def _split(parts: str | int | None) -> tuple[int, list[int]]:
    return (1, []) if parts is None else parse_split(str(parts))


def _factor(factor: str | None) -> float | None:
    if factor is None:
        return None
    number = factor.strip().lower().removesuffix("x").rstrip()
    whole, _, part = number.partition(".")
    is_decimal = whole.isdecimal() and (part.isdecimal() or "." not in number)
    if not (number.isascii() and is_decimal and len(number) <= _LONGEST):
        raise BadValue(
            f"cannot use --retry-oom {factor[:40]}: it is not a factor",
            "for 50% more memory at each retry: --retry-oom 1.5x",
        )
    return float(number)


@record(frozen=True)
class RunOptions:
    """The options of `run` as they were typed. The order is that of the help."""

    mem: str | None = _resource(
        "--mem", metavar="SIZE", help="Memory on each GPU: 4G, 40%; 4G..10G: more while free.",
        fields=("claim.memory", "claim.share", "claim.memory_bound", "claim.share_bound"),
        reads=_memory_range, python="memory", holds=True,
        edits="Memory on each GPU: 4G, 40%, 4G..10G.",
    )  # fmt: skip
    gpus: int | None = _resource(
        "--gpus", metavar="N", help="Number of GPUs; default: 1.",
        fields=("claim.gpus",), python="gpus", holds=True, edits="Number of GPUs.",
    )  # fmt: skip
    """None: as many as `gpu` names, or else one."""
    gpu: Sequence[str] = _resource(
        "--gpu", metavar="GPU", help="Only these: 1,3, UUIDs; all of them unless --gpus.",
        default=(), fields=("claim.named",), reads=gpu_names, python="gpu", holds=True,
        edits="Only these GPUs, all of them: 1,3; or any.", clears=("any", []),
    )  # fmt: skip
    """GPUs by index, UUID or the beginning of a UUID, also several with commas: "1,3"."""
    gpu_model: str | None = _resource(
        "--gpu-model", metavar="MODEL", help="Only GPUs of this model: A100.",
        fields=("claim.model",), python="gpu_model", holds=True,
        edits="Model: A100; or any.", clears=("any", ""),
    )  # fmt: skip
    min_vram: str | None = _resource(
        "--min-vram", metavar="SIZE", help="Only GPUs of this size or larger.",
        fields=("claim.min_vram",), reads=_size, python="min_vram", holds=True,
        edits="Least size of a GPU: 40G; or any.", clears=("any", 0),
    )  # fmt: skip
    same_model: bool = _resource(
        "--same-model", help="With --gpus: all of one model.", default=False,
        fields=("claim.same_model",), python="same_model", holds=True,
        edits="All GPUs of one model.",
    )  # fmt: skip
    linked: bool = _resource(
        "--linked", help="With --gpus: wait for GPUs that are linked by NVLink.", default=False,
        fields=("claim.linked",), python="linked", holds=True,
        edits="All GPUs linked by NVLink.",
    )  # fmt: skip
    exclusive: bool = _resource(
        "--exclusive", help="No other job on these GPUs.", default=False,
        fields=("claim.exclusive",), python="exclusive", holds=True,
    )  # fmt: skip
    ram: str | None = _resource(
        "--ram", metavar="SIZE", help="RAM of the job: 32G.",
        fields=("claim.ram",), reads=_size, python="ram", holds=True,
        edits="RAM of the job: 32G; or none.", clears=("none", 0), is_of_new_jobs=True,
    )  # fmt: skip
    cpus: int | None = _resource(
        "--cpus", metavar="N", help="CPU cores (hardware threads) of the job.",
        fields=("claim.cpus",), reads=_count, python="cpus", holds=True, is_of_new_jobs=True,
        edits="CPU cores of the job; or none.", clears=("none", 0),
    )  # fmt: skip
    time: str | None = _resource(
        "--time", metavar="SPAN", help="Time limit: 90s, 30m, 4h, 1d12h.",
        fields=("claim.time_limit",), reads=seconds, python="time_limit",
        edits="Time limit: 30m, 4h; or none.", clears=("none", 0.0),
    )  # fmt: skip
    early_signal: str | None = _resource(
        "--signal", metavar="SIG@SPAN", help="Send SIG this long before the time limit.",
        fields=("early_signal",),
    )  # fmt: skip
    grace: str | None = _resource(
        "--grace", metavar="SPAN", help="Time between SIGTERM and SIGKILL.",
        fields=("grace",), reads=delay, is_of_new_jobs=True,
    )  # fmt: skip
    new_lease: bool = _resource(
        "--new-lease", help="Inside a job: take a second lease.", default=False
    )
    detach: bool = _waiting(
        "-d", "--detach", help="Print the number of the job and return.", default=False,
        is_typed_only=True,
    )  # fmt: skip
    no_wait: bool = _waiting(
        "--no-wait", help="Give up (exit 75) if the job cannot start at once.", default=False,
        holds=True,
    )  # fmt: skip
    wait: str | None = _waiting(
        "--wait", metavar="SPAN", help="Give up (exit 75) after this time.",
        fields=("wait",), reads=seconds, python="wait", holds=True,
    )  # fmt: skip
    retry_oom: str | None = _waiting(
        "--retry-oom", metavar="FACTOR",
        help="Out of GPU memory: run again with more, as 1.5x; up to 4x in all.",
        fields=("retry_oom",), reads=_factor, python="retry_oom",
    )  # fmt: skip
    retries: int = _waiting(
        "--retries", metavar="N", help="The job failed: run it again, up to N times.", default=0,
        fields=("queue.retries",), python="retries",
        edits="If it fails, run it again, up to N times in all.",
    )  # fmt: skip
    retry_on: Sequence[str] = _waiting(
        "--retry-on", metavar="CODES", help="With --retries: only after these exit codes: 75,137.",
        default=(), fields=("queue.retry_on",), reads=exit_codes, python="retry_on",
    )  # fmt: skip
    retry_delay: str | None = _waiting(
        "--retry-delay", metavar="SPAN",
        help="Wait before the first retry, doubled at each; default: 10s, up to 1h.",
        fields=("queue.retry_delay",), reads=delay, python="retry_delay",
    )  # fmt: skip
    array: str | None = _waiting(
        "--array", metavar="INDICES",
        help="A job for each index, {} in COMMAND: 0-99, 1,3,5; %8: 8 at once.",
        fields=("queue.array",), is_typed_only=True,
    )  # fmt: skip
    grid: Sequence[str] = _waiting(
        "--grid", metavar="NAME=VALUES", default=(), fields=("grid",), reads=grid_values,
        help="A job for each combination: lr=0.1,0.01; seed=0-4; {lr} in COMMAND.",
        is_typed_only=True,
    )  # fmt: skip
    after: Sequence[str] = _waiting(
        "--after", metavar="JOB", help="Start when JOB has succeeded; also JOB:fail, JOB:any.",
        default=(), fields=("queue.after",), edits="Jobs to wait for: 17, 17:any; or none.",
        clears=("none", []),
    )  # fmt: skip
    begin: str | None = _waiting(
        "--begin", metavar="TIME", help="Do not start before: 22:00, +2h, or an instant.",
        fields=("queue.begin_at",), edits="Do not start before: 22:00, +2h; or now.",
        clears=("now", "now"),
    )  # fmt: skip
    held: bool = _waiting(
        "--held", help="Do not start until gpulease edit --no-held.", default=False,
        fields=("queue.held",), edits="Do not start; or may start again.",
    )  # fmt: skip
    requeue: bool = _waiting(
        "--requeue", help="The machine failed: queue the job again.", default=False,
        fields=("queue.requeue",), is_of_new_jobs=True,
    )  # fmt: skip
    preemptible: bool = _waiting(
        "--preemptible", help="Use idle memory; stop and queue again if others need it.",
        default=False, fields=("queue.preemptible",), is_of_new_jobs=True,
    )  # fmt: skip
    priority: Literal["low", "normal", "high"] = _waiting(
        "--priority", help="Class in the queue; default: normal. high: for admins.",
        default="normal", fields=("queue.priority",), is_of_new_jobs=True,
        edits="Class in the queue. high: for admins.",
    )  # fmt: skip
    nice: int = _waiting(
        "--nice", metavar="N", help="0 to 19: start later within the class; admins: -20.",
        default=0, fields=("queue.nice",), is_of_new_jobs=True,
        edits="0 to 19: start later within the class; admins: -20.",
    )  # fmt: skip
    slurm: Sequence[str] = _waiting(
        "--slurm", metavar="OPTIONS", default=(),
        help="On a cluster: options for srun and sbatch, as '-p long -w gpu2'.",
    )  # fmt: skip
    snapshot: bool = _waiting(
        "--snapshot", help="Run the script as it is now, even if it is edited meanwhile.",
        default=False, is_of_new_jobs=True,
    )  # fmt: skip
    snapshot_dir: str | None = _waiting(
        "--snapshot-dir", metavar="DIR", is_of_new_jobs=True,
        help="Run in a copy of DIR as it is now; what git ignores is linked.",
    )  # fmt: skip
    dry: bool = _waiting(
        "--dry-run", help="Say when it would start, and submit nothing; exit 75: not now.",
        default=False, is_typed_only=True,
    )  # fmt: skip
    json: bool = _waiting(
        "--json", help="With --dry-run: print JSON.", default=False, is_typed_only=True
    )
    name: str | None = _job(
        "--name", metavar="TEXT", help="Name in listings; default: the command's.",
        fields=("name",), python="name", holds=True, is_of_new_jobs=True,
        edits="New name in listings.",
    )  # fmt: skip
    end_with_command: bool = _job(
        "--end-with-command", help="End the job when this command ends, also if it is killed.",
        default=False, fields=("ends_with_client",),
    )  # fmt: skip
    notify: Sequence[str] = _job(
        "--notify", metavar="EVENTS", default=(),
        help="Notify you: start, end, fail, oom, over-lease, idle, time-left; digest.",
        fields=("notify",), reads=listed_events, holds=True, is_of_new_jobs=True,
    )  # fmt: skip
    """Events, also several with commas: "end,oom"."""
    verbose: bool = _job(
        "--verbose", help="Say which GPU each device name of the frameworks is.",
        default=False, is_of_new_jobs=True,
    )  # fmt: skip
    summary: bool = _job(
        "--summary", help="At the end, say what the job used: peaks, utilization, steps.",
        default=False, is_of_new_jobs=True,
    )  # fmt: skip
    desktop: Literal["off", "osc9", "osc777"] = _job(
        "--desktop", help="Have the terminal show a message at start and end, by this sequence.",
        default="off", is_of_new_jobs=True,
    )  # fmt: skip
    quiet: bool = _job(
        "-q", "--quiet", help="Say nothing about the job on the terminal, errors apart.",
        default=False, is_of_new_jobs=True,
    )  # fmt: skip
    shell: bool = _job(
        "--shell", help="Run your shell in place of COMMAND.", default=False, is_typed_only=True
    )
    pty: bool | None = _option(
        "--pty/--no-pty", panel="Terminal", is_of_new_jobs=True,
        help="Give the job a terminal, or none; default: if you are on a terminal.",
    )  # fmt: skip
    """None: with a terminal if this command has one."""
    detach_keys: str | None = _option(
        "--detach-keys", panel="Terminal", metavar="KEYS",
        help=r"Keys that leave the job running: ctrl-\,d.",
    )  # fmt: skip
    visible: Literal["uuid", "index"] = _framework(
        "--visible", help="How CUDA_VISIBLE_DEVICES names GPUs; default: uuid.", default="uuid",
        fields=("options.visible",), python="visible", holds=True,
    )  # fmt: skip
    growth: bool = _framework(
        "--growth", help="TensorFlow and JAX allocate memory as needed.", default=False,
        fields=("options.growth",), python="growth",
    )  # fmt: skip
    split: str | None = _framework(
        "--split", metavar="N|SIZES",
        help="TensorFlow sees each GPU as N logical GPUs, or as some of these sizes: 1G,2G.",
        fields=("options.split", "options.split_sizes"), reads=_split, python="split",
    )  # fmt: skip
    processes: int | None = _framework(
        "--processes", metavar="N",
        help="Divide the memory of the job equally between N processes that use its GPUs.",
        fields=("options.processes",), python="processes", holds=True,
    )  # fmt: skip
    deterministic: bool = _framework(
        "--deterministic", help="Frameworks use deterministic operations.", default=False,
        fields=("options.deterministic",),
    )  # fmt: skip
    omp_threads: int | None = _framework(
        "--omp-threads", metavar="N", help="Threads of OpenMP, MKL, OpenBLAS, NumExpr.",
        fields=("options.omp_threads",),
    )  # fmt: skip
    inter_op_threads: int | None = _framework(
        "--inter-op-threads", metavar="N", help="TensorFlow's threads between operations.",
        fields=("options.inter_op_threads",),
    )  # fmt: skip
    intra_op_threads: int | None = _framework(
        "--intra-op-threads", metavar="N", help="TensorFlow's threads in an operation.",
        fields=("options.intra_op_threads",),
    )  # fmt: skip
    soft_placement: bool = _framework(
        "--soft-placement", help="TensorFlow runs operations without a GPU kernel on CPU.",
        default=False, fields=("options.soft_placement",),
    )  # fmt: skip
    log_placement: bool = _framework(
        "--log-placement", help="TensorFlow logs the device of each operation.", default=False,
        fields=("options.log_placement",),
    )  # fmt: skip
    strict: bool = _framework(
        "--strict", help="Exit with 97 if a framework cannot be limited to the lease.",
        default=False, fields=("options.strict",),
    )  # fmt: skip
    no_defaults: bool = _option(
        "--no-defaults", panel="Options", default=False,
        help="Ignore [run] in your configuration and GPULEASE_RUN_OPTIONS.",
    )  # fmt: skip
    no_script_options: bool = _option(
        "--no-script-options", panel="Options", default=False,
        help="Ignore options in the script: lines such as # gpulease: --mem 4G.",
    )  # fmt: skip


def _taken_out() -> Iterator[tuple[str, Option]]:
    """Yield the options by their names, and leave their defaults in the class."""
    for name, annotation in RunOptions.__annotations__.items():
        option = getattr(RunOptions, name)
        vars(option)["annotation"] = annotation
        setattr(RunOptions, name, option.default)
        yield name, option


OPTIONS: Mapping[str, Option] = dict(_taken_out())
"""By the names of parameters."""


def run_options(values: Mapping[str, Any]) -> RunOptions:
    """Return the options among the values of parameters, as a parser returns them."""
    given: dict[str, Any] = {
        name: tuple(value or ()) if OPTIONS[name].is_list else value
        for name, value in values.items()
        if name in OPTIONS
    }
    return RunOptions(**given)


def given_flags(options: RunOptions) -> dict[str, Option]:
    """Return the options that differ from their defaults, by their long names: --mem, --no-pty."""
    found = {}
    for name, option in OPTIONS.items():
        value = getattr(options, name)
        if value is False and option.default is None:
            found[option.flags[0].partition("/")[2]] = option
        elif value != option.default:
            found[option.long] = option
    return found


_OF_OTHER_VERBS = {"span": "--for", "lasts_for": "--for", "begins_at": "--from", "pid": "PID"}
"""The options of `keep`, `reserve` and `adopt` that set a field, which have no row in OPTIONS."""


def option_of(field: str) -> str:
    """Return the option that sets a field of a request, or else the field."""
    of_run = (each.long for each in OPTIONS.values() if field in each.fields)
    return next(of_run, _OF_OTHER_VERBS.get(field, field))


def read_fields(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the fields of a request that values of options set, by the object that has them.

    Those of the request itself are under "". Of `values`, only those that set fields are read.

    Raises:
        BadValue: a value cannot be read.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        option = OPTIONS.get(name)
        if option is None or not option.fields:
            continue
        read = value if option.reads is None else option.reads(value)
        parts = read if len(option.fields) > 1 else (read,)
        for field, each in zip(option.fields, parts, strict=True):
            within, _, last = field.rpartition(".")
            found.setdefault(within, {})[last] = each
    return found
