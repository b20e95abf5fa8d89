"""What the end of an output tells of why a program ended, where that is a Python traceback. Pure.

A program may have met an error before, said so, and gone on: the last exception decides, with those
that it came from. The sentences are those of Python's own module `traceback`.
"""

from collections.abc import Sequence

_BEGINS = "Traceback (most recent call last):"
_CHAINED = frozenset(
    {
        "The above exception was the direct cause of the following exception:",
        "During handling of the above exception, another exception occurred:",
    }
)
_FRAMEWORKS = frozenset({"tensorflow", "keras", "torch", "jax", "jaxlib", "cupy", "numba"})
"""Their errors may follow from one that was only logged, as cuDNN's from a full GPU."""
_OF_OTHERS = frozenset(
    {"subprocess", "multiprocessing", "concurrent", "ray"}
    | {"KeyboardInterrupt", "EOFError", "BrokenPipeError", "ConnectionResetError"}
)
"""What is raised in one process because of another, which has said why."""
_UNCLEAR = frozenset({"RuntimeError", "SystemError", "OSError"})
_SPEAKS_OF_A_GPU = ("cuda", "cudnn", "cublas", "cufft", "nccl", "gpu", "device", "worker", "memory")
_PROCESS = "Process "
"""With its name and a colon: the line that `multiprocessing` writes before a traceback."""


def deciding(text: str) -> str:
    """Return the part of an output from which it can be told why the program ended.

    All of it, unless it has a traceback whose exception is the program's own and no framework's:
    then from the first one on that this came from.
    """
    lines = [line.rstrip("\r") for line in text.split("\n")]
    begins = [place for place, line in enumerate(lines) if line == _BEGINS]
    if not begins or _is_of_several(lines, begins):
        return text
    said = next((line for line in lines[begins[-1] + 1 :] if line[:1].strip()), "")
    if not said or _may_follow_from_another(said):
        return text
    first = len(begins) - 1
    while first > 0 and _is_chained(lines, begins[first - 1], begins[first]):
        first -= 1
    return "\n".join(lines[begins[first] :])


def _is_of_several(lines: Sequence[str], begins: Sequence[int]) -> bool:
    """Tell whether some traceback is that of a child of `multiprocessing`."""
    before = (lines[place - 1] for place in begins if place > 0)
    return any(line.startswith(_PROCESS) and line.endswith(":") for line in before)


def _may_follow_from_another(said: str) -> bool:
    """Tell whether an exception may come of an error that was told before, and not with it."""
    name, _, message = said.partition(":")
    if name.partition(".")[0] in _FRAMEWORKS | _OF_OTHERS:
        return True
    return name in _UNCLEAR and any(word in message.lower() for word in _SPEAKS_OF_A_GPU)


def _is_chained(lines: Sequence[str], before: int, begin: int) -> bool:
    """Tell whether the traceback that begins at `begin` says that it came of the one `before`."""
    between = [line for line in lines[before + 1 : begin] if line]
    return bool(between) and between[-1] in _CHAINED
