"""Rewrites the command of a job that starts a container, so that the container gets the lease.

A container inherits nothing from the job: no variables, no files, and GPUs only if its engine is
asked for them. So `docker run IMAGE` becomes `docker run OPTIONS IMAGE`. The options name the
leased GPUs, pass the lease's variables by name (the engine takes the values from the job's
environment) and mount what the variables name, the hooks and the ledger, at the paths that they
have outside. The command's own options for GPUs are dropped, because they may name GPUs of other
jobs. The daemon's socket is not mounted: a program could use it to start a job outside.

Pure. docs/containers.md has the rules for users.
"""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path, PurePath
from typing import Final, NamedTuple

ENGINES: Final = frozenset({"docker", "podman", "nerdctl"})

_FLAGS: Final = frozenset(
    {
        *("--detach", "--disable-content-trust", "--env-host", "--help", "--http-proxy", "--init"),
        *("--interactive", "--no-healthcheck", "--no-hostname", "--no-hosts", "--oom-kill-disable"),
        *("--passwd", "--privileged", "--publish-all", "--quiet", "--read-only"),
        *("--read-only-tmpfs", "--replace", "--rm", "--rmi", "--rootfs", "--sig-proxy"),
        *("--tls-verify", "--tty", "--unsetenv-all", "--use-api-socket"),
    }
)
"""The options of `run` without a value, of all engines. All others take one."""
_GLOBAL_FLAGS: Final = frozenset(
    {
        *("-D", "--debug", "--debug-full", "--experimental", "--help", "--insecure-registry"),
        *("--noout", "--remote", "-r", "--syslog", "--tls", "--tlsverify"),
        *("--trace", "--transient-store", "--version", "-v"),
    }
)
"""The engines' options before the command that have no value."""
_SHORT_FLAGS: Final = frozenset("diPqt")
_VISIBLE: Final = frozenset({"CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"})
_PATH: Final = "PYTHONPATH"


class _Option(NamedTuple):
    name: str
    value: str
    words: tuple[str, ...]
    """As typed."""


def starts_container(argv: Sequence[str]) -> bool:
    """Return whether a command is the `run` of a container engine."""
    return _end_of_run(argv) is not None


def with_lease(
    argv: Sequence[str],
    *,
    gpus: Sequence[str],
    variables: Collection[str],
    hooks: Path,
    ledger: str = "",
) -> tuple[tuple[str, ...], str]:
    """Return the command with the options that pass a lease to its container.

    The second result is a line for the owner about options that it no longer contains. Any other
    command is returned unchanged.

    Args:
        gpus: the UUIDs of the leased GPUs; empty if they are simulated, and there are no devices.
        variables: the names of the variables that the lease sets.
        hooks: the folder of the hooks.
        ledger: the file by which the processes of the job share the lease; "" for none.
    """
    begin = _end_of_run(argv)
    if begin is None:
        return tuple(argv), ""
    options = tuple(_options(argv[begin:]))
    end = begin + sum(len(option.words) for option in options)
    dropped = [option for option in options if _chooses_gpus(option, simulated=not gpus)]
    kept = [option for option in options if option not in dropped]
    paths = [option for option in kept if _variable(option) == (_PATH, True)]
    words = [
        *argv[:begin],
        *_devices(PurePath(argv[0]).name, gpus),
        *(word for name in sorted({*variables} - {_PATH}) for word in ("--env", name)),
        *("--env", f"{_PATH}={_with_hooks(paths, hooks)}"),
        *("--mount", f"type=bind,source={hooks},target={hooks},readonly"),
        *(("--mount", f"type=bind,source={ledger},target={ledger}") if ledger else ()),
        *(word for option in kept if option not in paths for word in option.words),
        *argv[end:],
    ]
    if not dropped:
        return tuple(words), ""
    typed = ", ".join(" ".join(option.words) for option in dropped)
    instead = "the leased GPUs" if gpus else "no GPU, because they are simulated"
    return tuple(words), f"the container gets {instead}, in place of: {typed}"


def _end_of_run(argv: Sequence[str]) -> int | None:
    """Return where the options of `run` begin; None if this is another command.

    A word behind an option is its value, as in `podman --log-level debug run`, except behind the
    options that have none.
    """
    if not argv or PurePath(argv[0]).name not in ENGINES:
        return None
    before = argv[0]
    for place, word in enumerate(argv[1:], 1):
        if word == "run":
            return place + 1
        is_value = before.startswith("-") and "=" not in before and before not in _GLOBAL_FLAGS
        if not (word.startswith("-") or is_value or word == "container"):
            return None
        before = word
    return None


def _options(words: Sequence[str]) -> Iterator[_Option]:
    """Yield the options before the image."""
    place = 0
    while place < len(words) and words[place].startswith("-") and words[place] not in ("-", "--"):
        word = words[place]
        name, value, takes_next = _parsed(word)
        if takes_next:
            value = words[place + 1] if place + 1 < len(words) else ""
        typed = tuple(words[place : place + (2 if takes_next else 1)])
        place += len(typed)
        yield _Option(name, value, typed)


def _parsed(word: str) -> tuple[str, str, bool]:
    """Return name and value of an option, and whether its value is the next word."""
    if word.startswith("--"):
        name, has_value, value = word.partition("=")
        return name, value, not has_value and name not in _FLAGS
    for place, letter in enumerate(word[1:], 1):
        if letter not in _SHORT_FLAGS:
            rest = word[place + 1 :]
            return f"-{letter}", rest.removeprefix("="), not rest
    return word, "", False


def _variable(option: _Option) -> tuple[str, bool]:
    """Return the variable that an option sets, "" if none, and whether it gives the value."""
    if option.name not in ("-e", "--env"):
        return "", False
    name, has_value, _ = option.value.partition("=")
    return name, bool(has_value)


def _chooses_gpus(option: _Option, *, simulated: bool) -> bool:
    if option.name == "--device":
        return option.value.startswith(("nvidia.com/gpu", "/dev/nvidia"))
    if option.name == "--runtime":
        return simulated and option.value == "nvidia"
    return option.name == "--gpus" or _variable(option)[0] in _VISIBLE


def _devices(engine: str, gpus: Sequence[str]) -> list[str]:
    """Return the options for the GPUs.

    NVIDIA_VISIBLE_DEVICES is set because images set it to "all", which NVIDIA's runtime and its
    hooks would follow.
    """
    names = ",".join(gpus)
    if not gpus:
        # With "void", NVIDIA's runtime adds nothing to the container.
        return ["--env", "NVIDIA_VISIBLE_DEVICES=void"]
    if engine == "podman":
        # With its CDI names; NVIDIA's hook for podman, where installed, adds nothing besides.
        cdi = [word for gpu in gpus for word in ("--device", f"nvidia.com/gpu={gpu}")]
        return [*cdi, "--env", "NVIDIA_VISIBLE_DEVICES=void"]
    # The value is a line of CSV, in which a comma needs quotes.
    device = f'"device={names}"' if len(gpus) > 1 else f"device={names}"
    return ["--gpus", device, "--env", f"NVIDIA_VISIBLE_DEVICES={names}"]


def _with_hooks(paths: Sequence[_Option], hooks: Path) -> str:
    """Return PYTHONPATH in the container: the hooks, then what the user sets there."""
    users = paths[-1].value.partition("=")[2] if paths else ""
    return f"{hooks}:{users}" if users else str(hooks)
