"""The help of all verbs, and short help for verbs with many options, without typer.

Each fits a screen of 24 lines and 80 columns.
"""

from __future__ import annotations

from gpulease.cli.render import drawn, screen_of
from gpulease.cli.tables import Hanging, Span, line
from gpulease.cli.verbs import (
    ADMINISTER,
    CHANGE,
    EVERYDAY,
    JOBS,
    LOOK,
    SHARE,
    VERBS,
    options_of_verb,
)
from gpulease.locations import environment
from gpulease.record import record, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import TextIO

    from gpulease.cli.tables import Block

_WIDTH = 80
_INDENT = 6


def help_of_all(stream: TextIO) -> str:
    """Return the help of `gpulease` for a stream."""
    return _text(list(_verbs()), stream)


def _text(page: list[Block], stream: TextIO) -> str:
    screen = screen_of(stream, environment())
    width = min(screen.width or _WIDTH, _WIDTH)
    return drawn(page, replace(screen, width=width, height=None)).rstrip("\n")


def _verbs() -> Iterator[Block]:
    yield line("Usage: gpulease VERB ...   Run jobs on leased GPU memory, and queue what waits.")
    yield line("")
    for name, verb in VERBS.items():
        if verb.group == EVERYDAY:
            example = ": gpulease run --mem 4G train.py" if name == "run" else "."
            yield line(f"  {name:8}{verb.summary.rstrip('.')}{example}")
    yield line("")
    for group in (JOBS, LOOK, CHANGE, SHARE, ADMINISTER):
        verbs = (
            f"{name} ({each.brief})" if each.brief else name
            for name, each in VERBS.items() if each.group == group
        )  # fmt: skip
        yield Hanging((Span(f"{group}: ", "heading"), Span(", ".join(verbs))), _INDENT)
    yield line("")
    yield line("  --socket PATH  Use the daemon on this socket.")
    yield line("  --version      Print the version.")
    yield line("gpulease VERB --help describes a verb.")


@record(frozen=True)
class Short:
    """The help of a verb with the options of a first day."""

    usage: str
    text: str
    options: Mapping[str, str]
    """What to type, by the parameter of the option."""
    examples: tuple[str, ...]


SHORT: Mapping[str, Short] = {
    "run": Short(
        "[OPTIONS] COMMAND [ARGUMENTS]",
        "Lease GPU memory, wait until it is free, and run COMMAND as you: with your python, "
        "directory, environment and terminal. Exits as COMMAND does.",
        {
            "mem": "--mem 4G", "gpus": "--gpus 2", "gpu": "--gpu 1,3", "exclusive": "--exclusive",
            "time": "--time 4h", "detach": "-d", "name": "--name sweep-7", "no_wait": "--no-wait",
            "after": "--after 17", "array": "--array 0-9",
            "notify": "--notify end,oom", "dry": "--dry-run",
        },
        (
            "gpulease run --mem 4G train.py --epochs 3",
            "gpulease run --mem 40% --gpus 2 --time 4h -d -- torchrun train.py",
        ),
    ),
    "hold": Short(
        "[OPTIONS]",
        "Lease GPU memory for this shell, and print the variables that put it into effect. The "
        "lease ends with the shell, with the process of --pid, or after --for.",
        {
            "mem": "--mem 4G", "gpus": "--gpus 2", "gpu": "--gpu 1,3", "lasts": "--for 2h",
            "pid": "--pid 4711", "no_wait": "--no-wait", "name": "--name notes",
            "as_json": "--json",
        },
        (
            'eval "$(gpulease hold --mem 4G)"',
            "gpulease hold --mem 4G | source               (fish)",
            "gpulease cancel $GPULEASE_JOB                 (releases it)",
        ),
    ),
    "edit": Short(
        "[OPTIONS] JOB...",
        "Change what waiting jobs ask for. They keep their age, and so their place. JOB is a "
        "number, 3-7, 17_3 (an element of array 17), a name, or 'last'.",
        {
            "mem": "--mem 6G", "gpus": "--gpus 2", "gpu": "--gpu any", "time": "--time 2h",
            "name": "--name eval", "after": "--after 12", "begin": "--begin 22:00",
            "held": "--held", "nice": "--nice 5",
        },
        ("gpulease edit 17 --mem 6G --time 2h", "gpulease edit last --no-held"),
    ),
    "reserve": Short(
        "[OPTIONS]",
        "Set GPUs apart for a time, called a window: only jobs of its users start there. For "
        "admins and root; everyone may list the windows, with gpulease reserve alone.",
        {
            "gpus": "--gpus 2", "gpu": "--gpu 0", "begin": "--from 'fri 18:00'",
            "span": "--for 12h", "every": "--every '0 22 * * *'", "user": "--user alice",
            "group": "--group lab", "name": "--name course", "cancel": "--cancel course",
        },
        (
            "gpulease reserve --gpus 2 --from 'fri 18:00' --for 12h --user alice",
            "gpulease reserve --gpus all --every '0 22 * * *' --for 8h --group lab",
        ),
    ),
}  # fmt: skip
"""By verb."""


def short_help(verb: str, stream: TextIO) -> str:
    """Return the short help of a verb for a stream."""
    return _text(list(_short(verb)), stream)


def _short(verb: str) -> Iterator[Block]:
    short, options = SHORT[verb], options_of_verb(verb)
    yield line(f"Usage: gpulease {verb} {short.usage}")
    yield line("")
    yield Hanging(line(short.text), 0)
    yield line("")
    width = max(map(len, short.options.values())) + 4
    for name, typed in short.options.items():
        text = options[name].help
        if len(text) > _WIDTH - width:
            text = f"{text.partition('; ')[0].rstrip('.')}."
        yield Hanging((Span(f"  {typed}".ljust(width)), Span(text)), width)
    yield line("")
    for example in short.examples:
        yield line(f"  {example}")
    yield line("")
    yield line(f"gpulease {verb} --help-all describes all options.")
