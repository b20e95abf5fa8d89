"""What `gpulease run` asks Slurm for: its options as those of srun and sbatch.

What has no counterpart is refused with what to use instead: no option is ignored silently.

A job asks for shards of one GPU, or for whole GPUs. Slurm accepts what no GPU can hold, and lets it
wait: it is refused here.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime

from gpulease.errors import BadUsage, BadValue, CannotLease
from gpulease.fingerprint import fingerprint_of, script_name
from gpulease.options import RunOptions, given_flags, option_of
from gpulease.record import record
from gpulease.slurm.annotations import ClusterNode, NodeSummary, learnt_size, shard_size
from gpulease.slurm.records import DEFAULT_SHARD, gres_of_node, is_number
from gpulease.units import MIB, Share, format_above, format_size, parse_memory, parse_span
from gpulease.wire.ranges import check_submission
from gpulease.wire.text import from_wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpulease.wire.requests import SubmitRequest

_MINUTE_S = 60
_LONGEST_NOTICE_S = 65535
"""Of --signal, see sbatch(1)."""
_TYPED = 'pass the option of Slurm, as in --slurm "{}"'
_IN_A_SHELL = "with --array: bash -c '...', with $SLURM_ARRAY_TASK_ID in it"
_WITHOUT_COUNTERPART = {
    "--gpu": ("Slurm chooses the GPU", "for a node: " + _TYPED.format("--nodelist=NODE")),
    "--gpu-model": ("Slurm does not know models", _TYPED.format("--constraint=FEATURE")),
    "--min-vram": ("Slurm does not know sizes of GPUs", _TYPED.format("--constraint=FEATURE")),
    "--same-model": ("Slurm does not know models", _TYPED.format("--constraint=FEATURE")),
    "--linked": (
        "Slurm chooses the GPUs",
        "leave it out: Slurm prefers linked GPUs where gres.conf has AutoDetect=nvml",
    ),
    "--preemptible": ("admins of Slurm decide what is preempted", _TYPED.format("--qos=NAME")),
    "--priority": ("Slurm computes priorities", f"--nice N, or {_TYPED.format('--qos=NAME')}"),
    "--retry-oom": ("Slurm does not change the size of a job", "submit it again with more --mem"),
    **dict.fromkeys(
        ("--retries", "--retry-on", "--retry-delay"),
        (
            "Slurm does not queue a job again that has failed",
            "the job can ask for that itself: python train.py || scontrol requeue $SLURM_JOB_ID",
        ),
    ),
    "--grid": ("Slurm runs one command for all elements", _IN_A_SHELL),
    "--grace": ("KillWait in slurm.conf sets it for all jobs", "leave out --grace"),
    "--verbose": ("the node names the devices", "gpulease show JOB on the job's node names them"),
    "--summary": ("the node measures the job", "gpulease show JOB on the job's node sums it up"),
    "--detach-keys": ("a job in the foreground ends with its command", "start it with -d"),
}
"""Options, why they cannot be used on a cluster, and what to use."""
_BACKGROUND_ONLY = {
    "--requeue": "Slurm queues only batch jobs again",
    "--array": "an array runs in the background",
}
_FOREGROUND_ONLY = {
    "--no-wait": "a batch job waits until it starts",
    "--wait": "a batch job waits until it starts",
    "--pty": "a batch job has no terminal",
    "--shell": "a batch job has no terminal",
}
_MAIL_TYPES = {
    "start": "BEGIN", "end": "END", "fail": "FAIL", "oom": "FAIL", "time-left": "TIME_LIMIT_90",
}  # fmt: skip
"""Slurm does not know of leases; a default for all jobs may have the events of these."""
_CONDITIONS = {"ok": "afterok", "fail": "afternotok", "any": "afterany"}
_WHOLE = "for whole GPUs: --gpus {count} --exclusive"


def slurm_options(options: RunOptions, request: SubmitRequest, gres: str) -> list[str]:
    """Return the options for srun, or for sbatch with --detach, without those of --slurm.

    Those of --after are added by the caller, as `dependency` returns them.

    Raises:
        BadValue: an option has no counterpart.
    """
    _refuse(options, request)
    words = ["--nodes=1", "--ntasks=1", f"--gres={gres}", f"--job-name={name_of(request)}"]
    words += [f"--chdir={from_wire(request.cwd)}", "--export=ALL"]
    ram, cores = request.claim.ram, request.claim.cpus
    words += [] if ram is None else [f"--mem={math.ceil(ram / MIB)}M"]
    words += [] if cores is None else [f"--cpus-per-task={cores}"]
    if options.time is not None:
        # Slurm counts in minutes.
        words.append(f"--time={math.ceil(parse_span(options.time).total_seconds() / _MINUTE_S)}")
    if request.early_signal is not None:
        words.append(f"--signal={_signal(request, batch=options.detach)}")
    if options.array is not None:
        words.append(f"--array={options.array}")
    if request.queue.begin_at is not None:
        begin = datetime.fromisoformat(request.queue.begin_at).astimezone()
        words.append(f"--begin={begin:%Y-%m-%dT%H:%M:%S}")
    words += ["--hold"] if options.held else []
    words += [f"--nice={options.nice}"] if options.nice else []
    words += ["--requeue"] if options.requeue else []
    return words + _mail_types(request.notify)


def _mail_types(events: Sequence[str]) -> list[str]:
    """Return the option for the mails of Slurm. Raises what `notify_events` raises."""
    from gpulease.wire.notifications import notify_events

    asked = {each.partition("=")[0] for each in notify_events(events)}
    types = dict.fromkeys(each for event, each in _MAIL_TYPES.items() if event in asked)
    return [f"--mail-type={','.join(types)}"] if types else []


def passed_options(texts: Sequence[str]) -> list[str]:
    """Return the words of --slurm. They come last, and replace what gpulease has chosen.

    Raises:
        BadUsage: they are no options.
    """
    words: list[str] = []
    for text in texts:
        try:
            found = shlex.split(text)
        except ValueError as error:
            raise BadUsage(f"cannot read --slurm {text!r}: {error}", "close the quotes") from None
        if found and not found[0].startswith("-"):
            raise BadUsage(
                f"cannot use --slurm {text!r}: it is no option of srun and sbatch",
                'write it with its dashes, as in --slurm "--partition=gpu"',
            )
        words += found
    return words


def dependency(job: str, condition: str, numbers: Mapping[str, str]) -> str:
    """Return a dependency as Slurm writes it: on a number, or a name, whose ids are `numbers`.

    Raises:
        BadValue: there is no such job.
    """
    number = job if is_number(job) else numbers.get(job)
    if number is None:
        raise BadValue(
            f"cannot wait for {job[:80]!r}: no job of yours has this name",
            "gpulease list --all shows all jobs; a job of another user is named by its number",
        )
    return f"{_CONDITIONS[condition]}:{number}"


def name_of(request: SubmitRequest) -> str:
    """Return the name of a job in Slurm's listings: that of --name, or that of the command."""
    if request.name is not None:
        return request.name
    argv = [from_wire(word) for word in request.argv]
    return script_name(argv, from_wire(request.cwd)) or argv[0].rpartition("/")[2]


def _signal(request: SubmitRequest, *, batch: bool) -> str:
    assert request.early_signal is not None
    # Of a batch job, only the shell gets it, which the command has replaced.
    shell = "B:" if batch else ""
    before = math.ceil(request.early_signal.before)
    if before > _LONGEST_NOTICE_S:
        raise BadValue(
            "cannot use --signal: Slurm sends it at most 18 hours before the time limit",
            "use a later time, such as --signal USR1@2h",
        )
    return f"{shell}{request.early_signal.signal}@{before}"


def _refuse(options: RunOptions, request: SubmitRequest) -> None:
    if options.array is not None and "{}" in request.argv:
        why = "Slurm runs one command for all elements"
        raise BadValue(f"cannot use --array with {{}} on a cluster: {why}", _IN_A_SHELL)
    given = given_flags(options)
    for option, (why, hint) in _WITHOUT_COUNTERPART.items():
        if option in given:
            raise BadValue(f"cannot use {option} on a cluster: {why}", hint)
    if options.detach:
        wrong, how, hint = _FOREGROUND_ONLY, "with", "leave out -d"
    else:
        wrong, how, hint = _BACKGROUND_ONLY, "without", "add -d"
    for option, why in wrong.items():
        if option in given:
            raise BadValue(f"cannot use {option} {how} -d on a cluster: {why}", hint)


@record(frozen=True)
class Size:
    """What to ask Slurm for."""

    gres: str
    """The value of --gres."""
    text: str
    """For people: 4G, or 2 whole GPUs."""
    reason: str | None = None
    """Why, if the user named no size."""


def refuse_out_of_range(request: SubmitRequest) -> None:
    """Check the values that the daemon checks elsewhere.

    Raises:
        BadValue: one is out of range; the error names the option.
    """
    try:
        check_submission(request)
    except BadValue as error:
        raise (error if error.parts is None else error.called(option_of(error.parts[0]))) from None


def size_of(
    options: RunOptions, request: SubmitRequest, capacity: Capacity, default: int | Share
) -> Size:
    """Return what a job asks for; `default` is the size of jobs that name none.

    Raises:
        BadValue: Slurm cannot express it.
        CannotLease: no GPU of the cluster has as much.
    """
    count = request.claim.gpus
    if options.exclusive:
        return _whole(options, count, capacity)
    if count > 1:
        raise BadValue(
            f"cannot lease a part of each of {count} GPUs: Slurm gives parts of one GPU only",
            _WHOLE.format(count=count),
        )
    if options.mem is not None and ".." in options.mem:
        raise BadValue(
            f"cannot use --mem {options.mem} on a cluster: Slurm grants shards for the whole run",
            "use one size, such as --mem 4G",
        )
    memory, reason = _memory(options, request, capacity, default)
    if isinstance(memory, Share):
        memory = _share(memory, capacity)
    _refuse_larger(memory, capacity)
    shards = max(1, -(-memory // capacity.shard))
    return Size(f"shard:{shards}", format_size(shards * capacity.shard), reason)


def _whole(options: RunOptions, count: int, capacity: Capacity) -> Size:
    if count > capacity.gpus > 0:
        raise CannotLease(
            f"cannot lease {count} GPUs: no node of the cluster has more than {capacity.gpus}",
            f"ask for at most --gpus {capacity.gpus}",
        )
    memory = None if options.mem is None else parse_memory(options.mem)
    if isinstance(memory, int):
        _refuse_larger(memory, capacity)
        if capacity.sizes and memory > min(capacity.sizes) * capacity.shard:
            raise BadValue(
                f"cannot use --mem {options.mem} with --exclusive: Slurm may choose a GPU with "
                f"{format_size(min(capacity.sizes) * capacity.shard)}",
                'name the type of the GPU, as in --slurm "--gres=gpu:TYPE:1"; sinfo -o %G lists '
                "the types",
            )
    if count == 1 and capacity.whole:
        # Slurm 22.05 grants gpu:1 on a GPU with shards in use, which its node has to refuse.
        return Size(f"shard:{capacity.whole}", "a whole GPU")
    return Size(f"gpu:{count}", "a whole GPU" if count == 1 else f"{count} whole GPUs")


def _memory(
    options: RunOptions, request: SubmitRequest, capacity: Capacity, default: int | Share
) -> tuple[int | Share, str | None]:
    if options.mem is not None:
        return parse_memory(options.mem), None
    argv, cwd = [from_wire(word) for word in request.argv], from_wire(request.cwd)
    fingerprint = fingerprint_of(argv, cwd)
    found = fingerprint and learnt_size(capacity.learnt, os.geteuid(), fingerprint)
    if not found:
        return default, "the default"
    size = min(found, capacity.largest or found)
    return size, f"since {script_name(argv, cwd)} needed that before"


def _share(share: Share, capacity: Capacity) -> int:
    if len(capacity.sizes) != 1:
        sizes = " and ".join(format_size(each * capacity.shard) for each in sorted(capacity.sizes))
        raise BadValue(
            f"cannot lease {share} of a GPU: GPUs of the cluster have {sizes or 'unknown sizes'}",
            "ask for a size, such as --mem 4G",
        )
    return max(MIB, share.of(capacity.largest))


def _refuse_larger(size: int, capacity: Capacity) -> None:
    if not capacity.sizes:
        raise CannotLease(
            "cannot lease a part of a GPU: Slurm knows no shards on this cluster",
            "an admin adds them to gres.conf and slurm.conf: gpulease-setup slurm prints the "
            "lines; whole GPUs: --exclusive",
        )
    if size > capacity.largest:
        raise CannotLease(
            f"cannot lease {format_above(size, capacity.largest)}: the largest GPU of the cluster "
            f"offers {format_size(capacity.largest)}",
            f"ask for at most --mem {format_size(capacity.largest)}",
        )


@record(frozen=True)
class Capacity:
    """All nodes together, those that are down included: jobs can wait for them."""

    shard: int = DEFAULT_SHARD
    """Bytes of one shard."""
    sizes: frozenset[int] = frozenset()
    """How many shards GPUs have."""
    gpus: int = 0
    """GPUs of the node that has most."""
    learnt: Sequence[Mapping[str, int]] = ()
    whole: int | None = None
    """How many shards every GPU has, if Slurm counts as many for each of them."""

    @property
    def largest(self) -> int:
        """Bytes of the largest GPU."""
        return max(self.sizes, default=0) * self.shard


def capacity_of(nodes: Sequence[ClusterNode], shard: int | None) -> Capacity:
    """Return what nodes offer; `shard` is that of the settings here, if they have one."""
    known = [(gres_of_node(node.fields.get("Gres", "")), node.summary) for node in nodes]
    summaries = [summary for _, summary in known if summary is not None]
    size = shard or shard_size(nodes)
    sizes = frozenset(shards for node in known for shards in _sizes(*node, size) if shards)
    whole = next(iter(sizes)) if len(sizes) == 1 else None
    if any(_total(counts, "shard") != (whole or 0) * _total(counts, "gpu") for counts, _ in known):
        whole = None
    return Capacity(
        shard=size,
        sizes=sizes,
        whole=whole,
        gpus=max((_total(counts, "gpu") for counts, _ in known), default=0),
        learnt=[each.learnt for each in summaries if each.learnt],
    )


_Counts = Mapping[tuple[str, str], int]


def _total(counts: _Counts, name: str) -> int:
    return sum(count for (each, _), count in counts.items() if each == name)


def _sizes(counts: _Counts, summary: NodeSummary | None, shard: int) -> list[int]:
    """Return the shards of each kind of GPU on a node.

    Slurm divides the shards of a node evenly over its GPUs if they are of one type, or if each type
    has shards; otherwise the node itself knows, and without it only the sum is known.
    """
    gpus = {kind: count for (name, kind), count in counts.items() if name == "gpu"}
    shards = _total(counts, "shard")
    if not gpus or not shards:
        return []
    if len(gpus) == 1:
        return [shards // _total(counts, "gpu")]
    if summary is None:
        return [shards]
    return [
        gpu.allocatable // shard
        for gpu in summary.gpus
        if gpu.allocatable is not None and not gpu.local
    ]
