"""`gpulease completion`: the script that makes a shell complete command lines of gpulease.

At each Tab the script calls `gpulease __complete WORD...` with the words up to the cursor. The
first line of the answer says what to do: "words" is followed by candidates, each with a tab and a
description; "files", "folders" and "program" are left to the shell; "command 4" means that the
line from word 4 on is another command with its own completion.
"""

import os
import pwd
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer

from gpulease import config
from gpulease.cli import commands
from gpulease.cli.render import OutputClosed, print_stdout
from gpulease.cli.typer_extensions import choices_of
from gpulease.client import Client, trusted_users
from gpulease.cluster_choice import VERBS, acts_on_slurm
from gpulease.drawing.words import clean, id_of, index_of, label
from gpulease.errors import GpuleaseError, NoDaemon
from gpulease.wire.machine import GpuView
from gpulease.wire.notifications import EVENTS_OF_JOBS

T = TypeVar("T")

_SHELLS = Path(__file__).parent / "shells"
_WITHIN_S = 1.0
"""Seconds that a daemon has to answer a Tab."""
_MOST_WORDS = 100
_LIVE = frozenset({"queued", "granted", "active", "releasing"})
_STATES = {
    "attach": frozenset({"granted", "active", "releasing"}),
    "edit": frozenset({"queued"}),
    "move": frozenset({"queued"}),
    "show": _LIVE | {"ended"},
    "plot": frozenset({"active", "releasing", "ended"}),
    "keep": frozenset({"granted", "active"}),
    "logs": frozenset({"active", "releasing", "ended"}),
}
"""The states of the jobs that a verb applies to; of the other verbs: jobs that have not ended."""
_OF_ALL_USERS = frozenset({"show", "plot"})
_SHELL_ACTIONS = {"COMMAND": "program", "PATH": "files", "FILE": "files", "DIR": "folders"}
"""What the shell completes, by the word that stands for it in the help."""


def completion(
    shell: Annotated[
        Literal["bash", "zsh", "fish"], typer.Argument(metavar="SHELL", help="The shell.")
    ],
) -> None:
    """Print a script that completes verbs, options, job numbers, GPUs, users and commands.

    SHELL is bash, zsh or fish. These lines load the script when it is first needed:

    \b
    Examples:
      mkdir -p ~/.local/share/bash-completion/completions
      echo 'eval "$(gpulease completion bash)"' \\
        > ~/.local/share/bash-completion/completions/gpulease
      gpulease completion fish > ~/.config/fish/completions/gpulease.fish
    """
    print_stdout(script(shell).rstrip("\n"))


def script(shell: str) -> str:
    """Return the script for `shell`."""
    return (_SHELLS / f"gpulease.{shell}").read_text(encoding="utf-8")


def answer(words: Sequence[str]) -> None:
    """Print how to complete the last of `words`, those of a command line after `gpulease`.

    Nothing is printed where anything fails: a Tab must not print an error into a command line.
    """
    with suppress(GpuleaseError, OutputClosed, OSError, LookupError):
        if lines := list(_answer(words or [""])):
            print_stdout("\n".join(lines))


def _answer(words: Sequence[str]) -> Iterator[str]:
    *before, (_, typed) = _rejoined(words)
    line = _CommandLine()
    for number, word in before:
        if line.read(word):
            yield f"command {number}"
            return
    # A shell that splits --mem=4G completes what comes after the =.
    yield from line.complete(typed, is_split=typed != words[-1])


def _rejoined(words: Sequence[str]) -> list[tuple[int, str]]:
    """Return each word with its number; `--mem = 4G`, as bash splits it, is one word."""
    joined: list[tuple[int, str]] = []
    for number, word in enumerate(words, 1):
        number_before, before = joined[-1] if joined else (0, "")
        if before.startswith("--") and (word == "=" or before.endswith("=")):
            joined[-1] = (number_before, before + word)
        else:
            joined.append((number, word))
    return joined


class _CommandLine:
    """What the words before the cursor say."""

    def __init__(self) -> None:
        self._socket: Path | None = None
        self._option: Any = None
        """The option that takes the next word."""
        self._only_arguments = False
        self._enter("")

    def _enter(self, verb: str) -> None:
        params = commands.parameters(verb)
        options = [param for param in params if param.param_type_name == "option"]
        self._verb = verb
        self._options = {
            name: option
            for option in options
            for name in sorted((*option.opts, *option.secondary_opts), key=len)
        }
        self._arguments = [param for param in params if param.param_type_name == "argument"]

    def read(self, word: str) -> bool:
        """Take in a word; return whether it begins a command with its own completion."""
        if self._option is not None:
            self._take_value(word)
        elif word.startswith("-") and not self._only_arguments:
            self._read_option(word)
        elif not self._verb:
            self._enter(word)
        elif self._arguments and _placeholder(self._arguments[0]) == "COMMAND":
            return True
        elif self._arguments and self._arguments[0].nargs != -1:
            del self._arguments[0]
        return False

    def _read_option(self, word: str) -> None:
        name, joined, value = word.partition("=")
        option = self._options.get(name)
        self._only_arguments = word == "--"
        if option is not None and not option.is_flag:
            self._option = option
            if joined:
                self._take_value(value)

    def _take_value(self, value: str) -> None:
        if "--socket" in self._option.opts:
            self._socket = Path(value).expanduser()
        self._option = None

    def complete(self, typed: str, *, is_split: bool) -> Iterator[str]:
        """Yield the answer for the word `typed`."""
        if self._option is not None:
            yield from self._values(self._option, typed)
        elif typed.startswith("-") and not self._only_arguments:
            name, joined, value = typed.partition("=")
            if not joined:
                texts = {name: option.help or "" for name, option in self._options.items()}
                yield from _words(typed, texts)
            elif (option := self._options.get(name)) is not None:
                yield from self._values(option, value, "" if is_split else f"{name}=")
        elif not self._verb:
            yield from _words(typed, commands.VERBS)
        elif self._arguments:
            yield from self._values(self._arguments[0], typed)

    def _values(self, param: Any, typed: str, prefix: str = "") -> Iterator[str]:
        """Yield the answer for a value of an option or for an argument."""
        placeholder = _placeholder(param)
        if placeholder in _SHELL_ACTIONS:
            yield _SHELL_ACTIONS[placeholder]
            return
        known: dict[str, Callable[[], dict[str, str]]] = {
            "JOB": self._jobs,
            "GPU": self._gpus,
            "MODEL": lambda: {clean(gpu.name): "" for gpu in self._gpu_views()},
            "PID": self._unmanaged,
            "USER": lambda: {user.pw_name: "" for user in pwd.getpwall()},
            "EVENTS": lambda: _notify_events(typed),
        }
        find = known.get(placeholder, lambda: dict.fromkeys(choices_of(param), ""))
        yield from _words(typed, find(), prefix)

    def _jobs(self) -> dict[str, str]:
        """Return the jobs of the caller that the verb applies to; root and admins type others."""
        states = _STATES.get(self._verb, _LIVE)
        everything = "ended" in states
        uid = os.geteuid()
        every_user = uid == 0 or self._verb in _OF_ALL_USERS
        if self._verb in VERBS and acts_on_slurm(self._socket):
            from gpulease.slurm.command.selection import candidates

            return candidates(states, None if every_user else str(uid), _WITHIN_S)
        user = None if every_user else pwd.getpwuid(uid).pw_name
        jobs = _ask(self._socket, lambda daemon: daemon.jobs(everything=everything, user=user)).jobs
        return {
            id_of(job): f"{clean(job.name)}, {label(job)}, {clean(job.user)}"
            for job in jobs
            if job.state in states
        }

    def _gpus(self) -> dict[str, str]:
        gpus = self._gpu_views()
        return {index_of(gpu): f"{clean(gpu.name)}, {gpu.state}" for gpu in gpus}

    def _gpu_views(self) -> Sequence[GpuView]:
        return _ask(self._socket, lambda daemon: daemon.status(queue=0)).gpus

    def _unmanaged(self) -> dict[str, str]:
        """Return the processes that use GPUs outside any lease."""
        gpus = self._gpu_views()
        found = (each for gpu in gpus for each in gpu.processes if each.job is None)
        return {str(each.pid): clean(f"{each.user}, {each.name}") for each in found}


def _words(typed: str, candidates: Mapping[str, str], prefix: str = "") -> Iterator[str]:
    yield "words"
    fitting = [word for word in candidates if word.startswith(typed)]
    for word in fitting[-_MOST_WORDS:]:
        yield f"{prefix}{word}\t{candidates[word].rstrip('.')}".rstrip("\t")


def _placeholder(param: Any) -> str:
    """Return the word that stands for a value in the help: JOB for `[JOB]...`."""
    return (param.metavar or "").strip("[]").partition(" ")[0].rstrip(".")


def _notify_events(typed: str) -> dict[str, str]:
    before, comma, _ = typed.rpartition(",")
    return {f"{before}{comma}{event}": "" for event in (*EVENTS_OF_JOBS, "all", "none")}


def _ask(socket: Path | None, request: Callable[[Client], T]) -> T:
    """Return the answer of the first daemon that gives one; none is started.

    Raises:
        NoDaemon: none does, in time.
    """
    # As for the verbs: only --socket may lead to the daemon of another user.
    trusted = None if socket is not None else trusted_users()
    for path in config.candidate_sockets(socket):
        try:
            return request(Client(path, trusted=trusted, answer_within=_WITHIN_S))
        except GpuleaseError:
            continue
    raise NoDaemon("no daemon answers")
