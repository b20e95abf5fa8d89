"""`gpulease completion`: the script that makes a shell complete the lines of gpulease.

What a shell may complete that only the daemon knows: jobs and GPUs, one on a line.

`gpulease __complete jobs cancel` is called by the completion scripts at every press of Tab. So it
imports next to nothing, gives the daemon little time, never starts one, and where anything at all
goes wrong it says nothing.
"""

import json
import os
import pwd
import shlex
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from gpulease import __version__, config
from gpulease.cli import commands
from gpulease.cli.command_spec import Option, Verb, Word
from gpulease.cli.render import show
from gpulease.peer_credentials import peer_credentials

_SHELLS = Path(__file__).parent / "shells"
_MARK = "# GRAMMAR\n"
_HELP = "What is printed is a script for this shell."


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(metavar="SHELL", help=_HELP)],
) -> None:
    """Print what makes a shell complete verbs, options, ids of jobs, GPUs and commands.

    SHELL is bash, zsh or fish. These lines load it when it is first needed:

    \b
    Examples:
      mkdir -p ~/.local/share/bash-completion/completions
      echo 'eval "$(gpulease completion bash)"' \\
        > ~/.local/share/bash-completion/completions/gpulease
      gpulease completion fish > ~/.config/fish/completions/gpulease.fish
    """
    show(script(shell, commands.grammar()).rstrip("\n"))


def script(shell: str, grammar: tuple[Verb, ...]) -> str:
    """Return the script for `shell`: the part that is the same for all, and what verbs there are.

    The first of `grammar` is what may stand before a verb.
    """
    written: dict[str, Callable[[tuple[Verb, ...]], Iterator[str]]] = {
        "bash": _bash,
        "zsh": _zsh,
        "fish": _fish,
    }
    template = (_SHELLS / f"gpulease.{shell}").read_text(encoding="utf-8")
    lines = "".join(f"{line}\n" for line in written[shell](grammar))
    return template.replace("VERSION", __version__, 1).replace(_MARK, lines)


def _bash(grammar: tuple[Verb, ...]) -> Iterator[str]:
    yield f"_gpulease_verbs={shlex.quote(_several(verb.name for verb in grammar[1:]))}"
    yield ""
    yield "# What verb $1 takes; without one, what stands before it."
    yield "_gpulease_grammar() {"
    yield "    options= arguments=()"
    yield "    case $1 in"
    for verb in grammar:
        names = " ".join(name for option in verb.options for name in option.names)
        arguments = " ".join(shlex.quote(_bash_word(word)) for word in verb.arguments)
        yield f"    {shlex.quote(verb.name)})"
        yield f"        options={shlex.quote(names)} arguments=({arguments}) ;;"
    yield "    esac"
    yield "}"
    yield ""
    yield "# Of what kind the value of option $2 of verb $1 is; a flag has none."
    yield "_gpulease_value() {"
    yield "    kind="
    yield '    case "$1 $2" in'
    for verb in grammar:
        for option in verb.options:
            if option.value.kind != "flag":
                names = " | ".join(shlex.quote(f"{verb.name} {name}") for name in option.names)
                yield f"    {names}) kind={shlex.quote(_bash_word(option.value))} ;;"
    yield "    esac"
    yield "}"


def _bash_word(word: Word) -> str:
    kind = _several(word.choices) if word.kind == "choice" else word.kind
    return f"{kind}..." if word.many else kind


def _several(words: Iterable[str]) -> str:
    return "choice:" + " ".join(words)


def _zsh(grammar: tuple[Verb, ...]) -> Iterator[str]:
    yield "# What verb $1 takes; without one, what stands before it, and the verbs."
    yield "_gpulease_grammar() {"
    yield "    case $1 in"
    for verb in grammar:
        yield f"    {shlex.quote(verb.name)})"
        yield "        specs=("
        specs = (*_zsh_options(verb), *_zsh_arguments(verb))
        yield from (f"            {shlex.quote(spec)}" for spec in specs)
        yield "        ) ;;"
    yield "    esac"
    yield "    verbs=("
    yield from (f"        {shlex.quote(f'{verb.name}:{verb.help}')}" for verb in grammar[1:])
    yield "    )"
    yield "}"


def _zsh_options(verb: Verb) -> Iterator[str]:
    for option in verb.options:
        others = "" if len(option.names) == 1 else f"({' '.join(option.names)})"
        for name in option.names:
            value = "" if option.value.kind == "flag" else f":{_zsh_value(verb, option.value)}"
            takes = "=" if value and name.startswith("--") else ""
            yield f"{others}{name}{takes}[{_zsh_text(option.help)}]{value}"


def _zsh_arguments(verb: Verb) -> Iterator[str]:
    for number, word in enumerate(verb.arguments, 1):
        if word.kind == "command":
            yield f"(-){number}:command:_gpulease_command"
            yield "*::arguments:_normal"
        else:
            place = "*" if word.many else str(number)
            yield f"{place}:{_zsh_value(verb, word)}"


def _zsh_value(verb: Verb, word: Word) -> str:
    actions = {
        "jobs": f" _gpulease_jobs {verb.name}",  # The blank keeps zsh from adding words.
        "gpus": " _gpulease_gpus",
        "command": "_gpulease_command",
        "file": "_files",
        "folder": "_files -/",
        "user": "_users",
        "choice": f"({' '.join(word.choices)})",
        "text": " ",
    }
    return f"{_zsh_text(word.shown) or ' '}:{actions[word.kind]}"


def _zsh_text(text: str) -> str:
    return "".join(f"\\{char}" if char in "[]:\\" else char for char in text)


def _fish(grammar: tuple[Verb, ...]) -> Iterator[str]:
    rest = grammar[1:]
    with_value = [
        shlex.quote(f"{verb.name} {name}")
        for verb in grammar
        for option in verb.options
        if option.value.kind != "flag"
        for name in option.names
    ]
    yield f"set -g __gpulease_with_value {' '.join(with_value)}"
    commands = [v.name for v in rest if any(word.kind == "command" for word in v.arguments)]
    yield f"set -g __gpulease_with_command {' '.join(commands)}"
    for verb in rest:
        yield (
            f"complete -c gpulease -f -n '__gpulease_at \"\"' "
            f"-a {verb.name} -d {_fish_text(verb.help)}"
        )
    for verb in grammar:
        where = f"-n '__gpulease_at \"{verb.name}\"'"
        for option in verb.options:
            yield f"complete -c gpulease {where} {_fish_option(verb, option)}"
        for number, word in enumerate(verb.arguments, 1):
            place = f"-n '__gpulease_at \"{verb.name}\" {number}{'+' if word.many else ''}'"
            if word.kind != "command":
                yield f"complete -c gpulease {place} {_fish_candidates(verb, word)}"


def _fish_option(verb: Verb, option: Option) -> str:
    named = [
        f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names
    ]
    value = "" if option.value.kind == "flag" else f" -r {_fish_candidates(verb, option.value)}"
    return f"{' '.join(named)} -d {_fish_text(option.help)}{value}".rstrip()


def _fish_candidates(verb: Verb, word: Word) -> str:
    candidates = {
        "jobs": f"'(__gpulease_ask jobs {verb.name})'",
        "gpus": "'(__gpulease_ask gpus)'",
        "user": "'(__fish_complete_users)'",
        "folder": "'(__fish_complete_directories)'",
        "choice": _fish_text(" ".join(word.choices)),
    }
    if word.kind == "file":
        return "-F"
    return f"-f -a {candidates[word.kind]}" if word.kind in candidates else "-f"


def _fish_text(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


_WITHIN_S = 1.0
_MOST = 100
"""Jobs that are offered, the newest of those that fit what was typed."""
_LIVE = frozenset({"queued", "granted", "active", "releasing"})
_STATES = {
    "attach": frozenset({"granted", "active", "releasing"}),
    "show": _LIVE | {"ended"},
    "keep": frozenset({"granted", "active"}),
    "logs": frozenset({"active", "releasing", "ended"}),
}
"""The states of the jobs that a verb can do something with; of the other verbs, those that live."""
_OF_ANYBODY = frozenset({"show"})


def answer(words: Sequence[str]) -> None:
    """Print what may stand for `words`: "jobs VERB TYPED [SOCKET]" or "gpus TYPED [SOCKET]"."""
    try:
        sys.stdout.write("".join(f"{line}\n" for line in _lines(list(words))))
        sys.stdout.flush()
    except (OSError, ValueError, LookupError, TypeError):
        return


def _lines(words: list[str]) -> Iterator[str]:
    match words:
        case ["jobs", verb, typed, *named]:
            yield from _jobs(verb, typed, named)
        case ["gpus", typed, *named]:
            yield from _gpus(typed, named)
        case _:
            return


def _jobs(verb: str, typed: str, named: list[str]) -> Iterator[str]:
    states = _STATES.get(verb, _LIVE)
    everything = "?all=true" if "ended" in states else ""
    fitting = [
        job
        for job in _ask(f"/jobs{everything}", named)["jobs"]
        if job["state"] in states and _concerns(job, verb) and str(job["id"]).startswith(typed)
    ]
    for job in fitting[-_MOST:]:
        how = job["state"] if job["state"] != "ended" else job["outcome"] or "ended"
        yield f"{job['id']}\t{_clean(job['name'])}, {_spoken(how)}, {_clean(job['user'])}"


def _concerns(job: dict[str, Any], verb: str) -> bool:
    """Tell whether the caller may do that to the job; admins type the number."""
    uid = os.geteuid()
    return uid == 0 or verb in _OF_ANYBODY or job["user"] == pwd.getpwuid(uid).pw_name


def _gpus(typed: str, named: list[str]) -> Iterator[str]:
    for gpu in _ask("/status", named)["gpus"]:
        index = gpu.get("label") or str(gpu["index"])
        if index.startswith(typed):
            yield f"{_clean(index)}\t{_clean(gpu['name'])}, {gpu['state']}"


def _spoken(name: str) -> str:
    # As gpulease.wire does it, without what that imports.
    return name.replace("_", "-")


def _clean(text: str) -> str:
    # As cli.text does it, without what that imports.
    return "".join(char if char.isprintable() else "?" for char in text)


def _ask(target: str, named: list[str]) -> Any:
    """Return the answer of the first daemon that gives one.

    Raises:
        OSError: none does, in time.
    """
    given = Path(named[0]).expanduser() if named and named[0] else None
    candidates = config.candidate_sockets(given)
    # As cli.connect has it: only --socket may lead to the daemon of another user.
    trusted = None if given is not None else {0, os.geteuid()}
    for path in candidates:
        try:
            return json.loads(_get(path, target, trusted))
        except OSError:
            continue
    raise ConnectionError("no daemon answers")


def _get(path: Path, target: str, trusted: set[int] | None) -> bytes:
    # http.client would take longer to import than all of this takes.
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(_WITHIN_S)
        link.connect(str(path))
        if trusted is not None and peer_credentials(link).uid not in trusted:
            raise PermissionError("the socket belongs to someone else")
        link.sendall(f"GET /v1{target} HTTP/1.0\r\nHost: gpulease\r\n\r\n".encode())
        whole = bytearray()
        while piece := link.recv(1 << 16):
            whole += piece
    head, _, body = bytes(whole).partition(b"\r\n\r\n")
    if head.split(b" ", 2)[1:2] != [b"200"]:
        raise ConnectionError("it refuses")
    return body
