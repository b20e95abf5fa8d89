"""The options of `gpulease run` as those of srun and sbatch.

What has no counterpart is refused with what to use instead: no option is ignored silently.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from datetime import datetime

from gpulease.errors import BadUsage, BadValue
from gpulease.options import RunOptions, given_flags
from gpulease.units import parse_span
from gpulease.wire.text import from_wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpulease.wire.requests import SubmitRequest

_MINUTE_S = 60
_LONGEST_NOTICE_S = 65535
"""Of --signal, see sbatch(1)."""
_TYPED = 'pass the option of Slurm, as in --slurm "{}"'
_WITHOUT_COUNTERPART = {
    "--gpu": ("Slurm chooses the GPU", "for a node: " + _TYPED.format("--nodelist=NODE")),
    "--gpu-model": ("Slurm does not know models", _TYPED.format("--constraint=FEATURE")),
    "--min-vram": ("Slurm does not know sizes of GPUs", _TYPED.format("--constraint=FEATURE")),
    "--same-model": ("Slurm does not know models", _TYPED.format("--constraint=FEATURE")),
    "--preemptible": ("admins of Slurm decide what is preempted", _TYPED.format("--qos=NAME")),
    "--priority": ("Slurm computes priorities", f"--nice N, or {_TYPED.format('--qos=NAME')}"),
    "--retry-oom": ("Slurm does not change the size of a job", "submit it again with more --mem"),
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
_NO_MAIL = "over-lease"
"""Slurm does not know of leases; a default for all jobs may have it."""
_CONDITIONS = {"ok": "afterok", "fail": "afternotok", "any": "afterany"}
_JOB = re.compile(r"\d+(?:_\d+)?", re.ASCII)


def slurm_options(options: RunOptions, request: SubmitRequest, gres: str) -> list[str]:
    """Return the options for srun, or for sbatch with --detach, without those of --slurm.

    Those of --after are added by the caller, as `dependency` returns them.

    Raises:
        BadValue: an option has no counterpart.
    """
    _refuse(options)
    words = ["--nodes=1", "--ntasks=1", f"--gres={gres}", f"--job-name={name_of(request)}"]
    words += [f"--chdir={from_wire(request.cwd)}", "--export=ALL"]
    if options.time is not None:
        words.append(f"--time={minutes(options.time)}")
    if request.early_signal is not None:
        words.append(f"--signal={_signal(request, batch=options.detach)}")
    if options.array is not None:
        words.append(f"--array={options.array}")
    if request.queue.begin_at is not None:
        begin = datetime.fromisoformat(request.queue.begin_at).astimezone()
        words.append(f"--begin={begin:%Y-%m-%dT%H:%M:%S}")
    if options.held:
        words.append("--hold")
    if options.nice:
        words.append(f"--nice={options.nice}")
    if options.requeue:
        words.append("--requeue")
    words += _mail_types(request.notify)
    return words


def _mail_types(events: Sequence[str]) -> list[str]:
    """Return the option for the mails of Slurm.

    Raises:
        BadValue: there is no such event.
    """
    asked = list(_MAIL_TYPES) if "all" in events else [each.partition("=")[0] for each in events]
    for each in asked:
        if each not in _MAIL_TYPES and each != _NO_MAIL:
            raise BadValue(
                f"cannot submit: no event named {each!r}",
                f"use some of {', '.join(_MAIL_TYPES)}, all, or none",
            )
    types = {_MAIL_TYPES[each]: None for each in asked if each != _NO_MAIL}
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


def dependency(word: str, numbers: dict[str, str]) -> str:
    """Return JOB, JOB:ok, JOB:fail or JOB:any as Slurm writes it; `numbers` are ids by name.

    Raises:
        BadValue: there is no such job.
    """
    job, condition = split_condition(word)
    number = job if _JOB.fullmatch(job) else numbers.get(job)
    if number is None:
        raise BadValue(
            f"cannot wait for {job[:80]!r}: no job of yours has this name",
            "gpulease list --all shows all jobs; a job of another user is named by its number",
        )
    return f"{_CONDITIONS[condition]}:{number}"


def split_condition(word: str) -> tuple[str, str]:
    """Return the job and the condition of --after."""
    job, _, condition = word.rpartition(":")
    return (job, condition) if job and condition in _CONDITIONS else (word, "ok")


def is_number(job: str) -> bool:
    """Return whether a word is the id of a job: 17 or 17_3."""
    return _JOB.fullmatch(job) is not None


def name_of(request: SubmitRequest) -> str:
    """Return the name of a job in Slurm's listings: that of --name, or that of the command."""
    if request.name is not None:
        return request.name
    from gpulease.fingerprint import script_name

    argv = [from_wire(word) for word in request.argv]
    return script_name(argv, from_wire(request.cwd)) or argv[0].rpartition("/")[2]


def minutes(span: str) -> int:
    """Return a time limit in minutes, as Slurm counts it, rounded up."""
    return math.ceil(parse_span(span).total_seconds() / _MINUTE_S)


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


def _refuse(options: RunOptions) -> None:
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
