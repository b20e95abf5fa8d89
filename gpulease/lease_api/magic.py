"""`%load_ext gpulease`: the line magic %gpulease, which leases GPU memory for a notebook's kernel.

%gpulease 4G --gpus 2      options as of gpulease run, and the arguments of gpulease.lease
%gpulease                  show the lease
%gpulease release
"""

import shlex
from inspect import Parameter, cleandoc, signature
from typing import Any

from gpulease.errors import BadUsage, GpuleaseError
from gpulease.lease_api import api
from gpulease.options import OPTIONS
from gpulease.units import format_size
from gpulease.wire.text import on_gpus

_USAGE = "%gpulease 4G leases 4 GiB, %gpulease 4G --gpus 2 on each of two GPUs"
_LEFT_OUT = ("client",)
_SHORT = {name: each.python for name, each in OPTIONS.items() if each.python not in (None, name)}
"""The spellings of the command line for arguments of `gpulease.lease`."""

_taken_by: list[str] = []
"""The words that took the lease of this kernel."""


def load_ipython_extension(shell: Any) -> None:
    """Add the magic to an IPython shell."""
    shell.register_magic_function(_magic, "line", "gpulease")


def _magic(line: str) -> None:
    """Lease GPU memory for this kernel.

    %gpulease 4G --gpus 2 --time 8h    lease memory on each GPU; waits in the queue
    %gpulease                          show the lease
    %gpulease release                  release it, if no framework has used the GPU
    %gpulease --help                   list the options

    Options are those of `gpulease.lease`, such as --gpu-model A100 or --wait 30m.
    """
    from IPython.core.error import UsageError

    try:
        print(_answer(shlex.split(line)))  # noqa: T201  the output of a cell
    except (GpuleaseError, ValueError) as error:
        # IPython shows it without a traceback, and does not run the cells that follow.
        text = error.text() if isinstance(error, GpuleaseError) else str(error)
        raise UsageError(text) from None


def _answer(words: list[str]) -> str:
    if words in (["--help"], ["-h"]):
        return f"{cleandoc(_magic.__doc__ or '')}\n\n{_options(_known())}"
    mine = api.held_lease()
    if words == ["release"]:
        if mine is None:
            raise BadUsage("cannot release: this kernel has taken no lease", _USAGE)
        mine.release()
        return _described(api.held_lease())
    if not words or (mine is not None and words == _taken_by and mine.held):
        return _described(mine)
    memory, options = read_line(words)
    taken = api.lease(memory, **options)
    _taken_by[:] = words
    return _described(taken)


def _described(mine: api.Lease | None) -> str:
    if mine is not None:
        has = on_gpus(format_size(mine.memory), len(mine.gpus))
        state = "" if mine.held else ", ended"
        return f"job {mine.id}: {has}{state}"
    if (around := api.inherited_lease()) is not None:
        sizes = " and ".join(format_size(gpu.memory) for gpu in around.gpus)
        return f"job {around.job}, which this kernel belongs to: {sizes}"
    return f"no lease; {_USAGE}"


def read_line(words: list[str]) -> tuple[str | None, dict[str, Any]]:
    """Return the memory and the keywords for `gpulease.lease`.

    Raises:
        BadUsage: an option does not exist, or has no value.
    """
    known = _known()
    memory, options, rest = None, dict[str, Any](), list(words)
    while rest:
        word, given, value = rest.pop(0).partition("=")
        if not word.startswith("--"):
            memory = _only_size(memory, word)
            continue
        name = word[2:].replace("-", "_")
        name = _SHORT.get(name, name)
        if name not in known:
            raise BadUsage(f"cannot understand {word}: no such option", _options(known))
        if known[name].default is False:
            options[name] = True
        elif given or rest:
            text = value if given else rest.pop(0)
            is_count = "int" in str(known[name].annotation) and name != "memory"
            options[name] = int(text) if is_count and text.isdigit() else text
        else:
            raise BadUsage(f"cannot understand {word}: its value is missing", _options(known))
        if name == "memory":
            memory = _only_size(memory, options.pop(name))
    return memory, options


def _known() -> dict[str, Parameter]:
    parameters = signature(api.lease).parameters.items()
    return {name: each for name, each in parameters if name not in _LEFT_OUT}


def _only_size(before: str | None, size: str) -> str:
    if before is not None:
        raise BadUsage(f"cannot understand {size!r}: the size is {before}", _USAGE)
    return size


def _options(known: dict[str, Parameter]) -> str:
    spelled = {name: short for short, name in _SHORT.items()}
    names = ", ".join(f"--{spelled.get(name, name).replace('_', '-')}" for name in known)
    return f"options: {names}"
