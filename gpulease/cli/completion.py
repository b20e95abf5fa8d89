"""What a shell completes: the script that makes it ask, and the answers.

At each Tab the script calls `gpulease __complete WORD...` with the words up to the cursor. The
first line of the answer says what to do: "words" is followed by candidates, each with a tab and a
description; "files", "folders" and "program" are left to the shell; "command 4" means that the
line from word 4 on is another command with its own completion.
"""

from __future__ import annotations

import os
import pwd

from gpulease.cli.render import OutputClosed, own_name, print_stdout
from gpulease.cli.verbs import VERBS, arguments_of_verb, options_of_verb
from gpulease.client.light_client import LightClient
from gpulease.client.transport import candidates
from gpulease.errors import GpuleaseError, NoDaemon
from gpulease.locations import environment
from gpulease.options import Option

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import TypeVar

    from gpulease.cli.everyday_options import Argument
    from gpulease.wire.machine import GpuView

    T = TypeVar("T")

_SHELLS = f"{os.path.dirname(__file__)}/shells"
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
    "again": frozenset({"ended"}),
    "logs": frozenset({"active", "releasing", "ended"}),
}
"""The states of the jobs that a verb applies to; of the other verbs: jobs that have not ended."""
_WITHOUT_DAEMON = frozenset({"completion", "kernel", "replay"})
_OF_ALL_USERS = frozenset({"show", "plot"})
_SHELL_ACTIONS = {"COMMAND": "program", "PATH": "files", "FILE": "files", "DIR": "folders"}
"""What the shell completes, by the word that stands for it in the help."""
_SOCKET = Option(("--socket",), "Use the daemon on this socket.", "Options", metavar="PATH")
_HELP = Option(("-h", "--help"), "Show this message and exit.", "Options", annotation="bool")
_VERSION = Option(("--version",), "Print the version.", "Options", annotation="bool")


def print_script(*, shell: str, socket: str | None = None) -> None:
    """Print the script for a shell."""
    print_stdout(script(shell).rstrip("\n"))


def script(shell: str) -> str:
    """Return the script for `shell`."""
    with open(f"{_SHELLS}/gpulease.{shell}", encoding="utf-8") as file:
        return file.read()


def answer(words: Sequence[str]) -> None:
    """Print how to complete the last of `words`, those of a command line after `gpulease`.

    Nothing is printed where anything fails: a Tab must not print an error into a command line.
    """
    try:
        if lines := list(_answer(words or [""])):
            print_stdout("\n".join(lines))
    except (GpuleaseError, OutputClosed, OSError, LookupError):
        pass


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
        self._socket: str | None = None
        self._option: Option | None = None
        """The option that takes the next word."""
        self._only_arguments = False
        self._enter("")

    def _enter(self, verb: str) -> None:
        more = [] if verb in _WITHOUT_DAEMON else [_SOCKET] if verb else [_VERSION, _SOCKET]
        options = [*options_of_verb(verb).values(), *more, _HELP]
        self._verb = verb
        self._options = {
            name: option
            for option in options if not verb or verb in VERBS
            for flag in sorted(option.flags, key=len)
            for name in flag.split("/")
        }  # fmt: skip
        self._arguments = list(arguments_of_verb(verb))

    def read(self, word: str) -> bool:
        """Take in a word; return whether it begins a command with its own completion."""
        if self._option is not None:
            self._take_value(word)
        elif word.startswith("-") and not self._only_arguments:
            self._read_option(word)
        elif not self._verb:
            self._enter(word)
        elif self._arguments and self._arguments[0].metavar == "COMMAND":
            return True
        elif self._arguments and not self._arguments[0].is_list:
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
        if self._option is _SOCKET:
            self._socket = os.path.expanduser(value)
        self._option = None

    def complete(self, typed: str, *, is_split: bool) -> Iterator[str]:
        """Yield the answer for the word `typed`."""
        if self._option is not None:
            yield from self._values(self._option, typed)
        elif typed.startswith("-") and not self._only_arguments:
            name, joined, value = typed.partition("=")
            if not joined:
                texts = {name: option.help for name, option in self._options.items()}
                yield from _words(typed, texts)
            elif (option := self._options.get(name)) is not None:
                yield from self._values(option, value, "" if is_split else f"{name}=")
        elif not self._verb:
            yield from _words(typed, {name: each.summary for name, each in VERBS.items()})
        elif self._arguments:
            yield from self._values(self._arguments[0], typed)

    def _values(self, param: Option | Argument, typed: str, prefix: str = "") -> Iterator[str]:
        """Yield the answer for a value of an option or for an argument."""
        placeholder = _placeholder(param)
        if placeholder in _SHELL_ACTIONS:
            yield _SHELL_ACTIONS[placeholder]
            return
        known: dict[str, Callable[[], dict[str, str]]] = {
            "JOB": self._jobs,
            "GPU": self._gpus,
            "MODEL": self._models,
            "PID": self._unmanaged,
            "USER": lambda: {user.pw_name: "" for user in pwd.getpwall()},
            "EVENTS": lambda: _notify_events(typed),
        }
        find = known.get(placeholder, lambda: dict.fromkeys(param.choices, ""))
        yield from _words(typed, find(), prefix)

    def _jobs(self) -> dict[str, str]:
        """Return the jobs of the caller that the verb applies to; root and admins type others."""
        from gpulease.cluster_choice import VERBS as ON_SLURM
        from gpulease.cluster_choice import acts_on_slurm
        from gpulease.drawing.words import clean, id_of, label

        states = _STATES.get(self._verb, _LIVE)
        everything = "ended" in states
        uid = os.geteuid()
        every_user = uid == 0 or self._verb in _OF_ALL_USERS
        if self._verb in ON_SLURM and acts_on_slurm(self._socket):
            from gpulease.slurm.command.selection import candidates

            return candidates(states, None if every_user else str(uid), _WITHIN_S)
        user = None if every_user else own_name()
        jobs = _ask(self._socket, lambda daemon: daemon.jobs(everything=everything, user=user)).jobs
        return {
            id_of(job): f"{clean(job.name)}, {label(job)}, {clean(job.user)}"
            for job in jobs
            if job.state in states
        }

    def _gpus(self) -> dict[str, str]:
        from gpulease.drawing.words import clean, index_of

        gpus = self._gpu_views()
        return {index_of(gpu): f"{clean(gpu.name)}, {gpu.state}" for gpu in gpus}

    def _gpu_views(self) -> Sequence[GpuView]:
        return _ask(self._socket, lambda daemon: daemon.status(queue=0)).gpus

    def _models(self) -> dict[str, str]:
        from gpulease.drawing.words import clean

        return {clean(gpu.name): "" for gpu in self._gpu_views()}

    def _unmanaged(self) -> dict[str, str]:
        """Return the processes that use GPUs outside any lease."""
        from gpulease.drawing.words import clean

        gpus = self._gpu_views()
        found = (each for gpu in gpus for each in gpu.processes if each.job is None)
        return {str(each.pid): clean(f"{each.user}, {each.name}") for each in found}


def _words(typed: str, candidates: Mapping[str, str], prefix: str = "") -> Iterator[str]:
    yield "words"
    fitting = [word for word in candidates if word.startswith(typed)]
    for word in fitting[-_MOST_WORDS:]:
        yield f"{prefix}{word}\t{candidates[word].rstrip('.')}".rstrip("\t")


def _placeholder(param: Option | Argument) -> str:
    """Return the word that stands for a value in the help: JOB for `[JOB]...`."""
    return (param.metavar or "").strip("[]").partition(" ")[0].rstrip(".")


def _notify_events(typed: str) -> dict[str, str]:
    from gpulease.wire.notifications import EVENTS_OF_JOBS

    before, comma, _ = typed.rpartition(",")
    return {f"{before}{comma}{event}": "" for event in (*EVENTS_OF_JOBS, "all", "none")}


def _ask(socket: str | None, request: Callable[[LightClient], T]) -> T:
    """Return the answer of the first daemon that gives one; none is started.

    Raises:
        NoDaemon: none does, in time.
    """
    for transport in candidates(socket, environment()):
        try:
            return request(LightClient(transport.within(_WITHIN_S)))
        except GpuleaseError:
            continue
    raise NoDaemon("no daemon answers")
