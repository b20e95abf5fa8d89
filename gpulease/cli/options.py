"""The options of `run`, and those that it shares: how each is written, and what its help says."""

from functools import partial
from typing import Annotated, Literal

import typer

_option = partial(typer.Option, show_default=False)

MemOption = Annotated[
    str | None, _option("--mem", metavar="SIZE", help="Memory on each GPU: 4G, 4096M, 40%.")
]
GpusOption = Annotated[int, _option("--gpus", metavar="N", help="How many GPUs; 1 if left out.")]
ExclusiveOption = Annotated[bool, _option("--exclusive", help="Share the GPUs with nobody.")]
TimeOption = Annotated[
    str | None, _option("--time", metavar="SPAN", help="End the job after 90s, 30m, 4h, 1d12h.")
]
SignalOption = Annotated[
    str | None,
    _option("--signal", metavar="SIG@SPAN", help="Send SIG that long before the time is up."),
]
GraceOption = Annotated[
    str | None,
    _option("--grace", metavar="SPAN", help="How long it may take to end once it is asked to."),
]
NameOption = Annotated[
    str | None, _option("--name", metavar="TEXT", help="What listings call the job.")
]
DetachOption = Annotated[
    bool, _option("-d", "--detach", help="Print the job's id and return at once.")
]
ShellOption = Annotated[bool, _option("--shell", help="Run your shell; COMMAND is left out.")]
PtyOption = Annotated[
    bool | None,
    _option("--pty/--no-pty", help="Give the job a terminal, or none; one on a terminal."),
]
DetachKeysOption = Annotated[
    str | None,
    _option("--detach-keys", metavar="KEYS", help=r"What leaves the job running: ctrl-\,d."),
]
RetryOomOption = Annotated[
    str | None,
    _option(
        "--retry-oom", metavar="FACTOR", help="Out of memory: again with more; 1.5x, 4x at most."
    ),
]
NoWaitOption = Annotated[
    bool, _option("--no-wait", help="Give up (exit 75) if it would have to wait.")
]
WaitOption = Annotated[
    str | None, _option("--wait", metavar="SPAN", help="Give up (exit 75) after so long.")
]
VisibleOption = Annotated[
    Literal["uuid", "index"],
    _option("--visible", help="How CUDA_VISIBLE_DEVICES names the GPUs; uuid if left out."),
]
GrowthOption = Annotated[bool, _option("--growth", help="TensorFlow takes memory as it needs it.")]
SplitOption = Annotated[
    int, _option("--split", metavar="N", help="Show each GPU as N logical ones.")
]
InterOpThreadsOption = Annotated[
    int | None, _option("--inter-op-threads", metavar="N", help="TensorFlow's, between ops.")
]
IntraOpThreadsOption = Annotated[
    int | None, _option("--intra-op-threads", metavar="N", help="TensorFlow's, within an op.")
]
SoftPlacementOption = Annotated[
    bool, _option("--soft-placement", help="Ops without a GPU kernel run on the CPU.")
]
LogPlacementOption = Annotated[
    bool, _option("--log-placement", help="Log where each op is placed.")
]
NewLeaseOption = Annotated[
    bool, _option("--new-lease", help="Inside a job: lease anew, beside what the job has.")
]
StrictOption = Annotated[
    bool, _option("--strict", help="Fail if the framework cannot be held to the lease.")
]
