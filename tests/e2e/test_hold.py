"""`gpulease hold`: a lease for a shell, in real shells, and for as long as they last."""

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from daemon_rig import Daemon
from goldens import mentions
from gpulease.cli.hold import statements, syntax_of

G = 1024**3
GPULEASE = f'"{sys.executable}" -m gpulease.cli'
PLAIN = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}

SHELLS = [shell for shell in ("bash", "dash", "zsh", "ksh", "busybox") if shutil.which(shell)]


def command(shell: str, script: str) -> list[str]:
    return [shell, *(["sh"] if shell == "busybox" else []), "-c", script]


def environment(daemon: Daemon, **more: str) -> dict[str, str]:
    return PLAIN | {"GPULEASE_SOCKET": str(daemon.socket)} | more


def run(daemon: Daemon, script: str, shell: str = "bash", **more: str) -> Any:
    return subprocess.run(
        command(shell, script), env=environment(daemon, **more), capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip


def open_shell(daemon: Daemon, script: str, shell: str = "bash") -> subprocess.Popen[str]:
    """Run a script that says on stdout when it has done its work, and waits for a line."""
    return subprocess.Popen(
        command(shell, script + "\nread line"), env=environment(daemon), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> str:
    """Let a shell end, and return what it wrote to stderr."""
    return process.communicate("\n", timeout=120)[1]


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_holds_what_it_evaluates_until_it_ends(daemon: Daemon, shell: str) -> None:
    process = open_shell(
        daemon, f'eval "$({GPULEASE} hold --mem 3G --name mine)"\n'
        'echo "$GPULEASE_JOB $GPULEASE_MEMORY $CUDA_VISIBLE_DEVICES"', shell
    )  # fmt: skip
    number, memory, visible = line_of(process).split()

    job = daemon.job(int(number))
    assert (job["state"], job["name"], job["kind"]) == ("active", "mine", "hold")
    assert job["pid"] == process.pid
    assert int(memory) == 3 * G
    assert visible == job["leases"][0]["gpu"]

    said = end(process)
    assert mentions(said, f"gpulease: job {number} ", "3G", "1 GPU", f"process {process.pid}")
    assert daemon.wait_until(int(number), "ended")["outcome"] == "released"


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
@pytest.mark.parametrize("form", ["{} | source", "eval ({})"])
def test_fish_holds_what_it_sources(daemon: Daemon, form: str) -> None:
    hold = form.format(f"{GPULEASE} hold --mem 3G")
    process = open_shell(daemon, f"{hold}; echo $GPULEASE_JOB $GPULEASE_MEMORY", "fish")
    number, memory = line_of(process).split()
    assert daemon.job(int(number))["pid"] == process.pid
    assert int(memory) == 3 * G
    end(process)
    assert daemon.wait_until(int(number), "ended")["outcome"] == "released"


def test_a_wrapper_inside_the_brackets_does_not_hold_it(daemon: Daemon, tmp_path: Path) -> None:
    wrapper = tmp_path / "mine"
    wrapper.write_text(f'#!/bin/sh\n{GPULEASE} hold --mem 1G "$@"\n')
    wrapper.chmod(0o755)

    process = open_shell(daemon, f'eval "$({wrapper} --name w)"; echo $GPULEASE_JOB')

    assert daemon.job(int(line_of(process)))["pid"] == process.pid
    end(process)


def test_json_tells_the_job_and_what_to_set(daemon: Daemon) -> None:
    told = json.loads(daemon.run("hold", "--mem", "3G", "--for", "1h", "--json").stdout)
    assert told["set"]["GPULEASE_JOB"] == str(told["job"]["id"])
    assert told["set"]["CUDA_VISIBLE_DEVICES"] == told["job"]["leases"][0]["gpu"]
    assert isinstance(told["unset"], list)


def test_variables_that_are_no_text_pass_unharmed(daemon: Daemon) -> None:
    odd = os.fsdecode(b"/caf\xc3\xa9/\xff'")
    ran = subprocess.run(
        ["bash", "-c", f'eval "$({GPULEASE} hold --mem 1G)"; printf %s "$PYTHONPATH"'],
        env=environment(daemon, PYTHONPATH=odd), capture_output=True, check=False, timeout=120,
    )  # fmt: skip
    assert ran.stdout.endswith(b":" + os.fsencode(odd)), ran
    told = daemon.run(
        "hold", "--mem", "1G", "--for", "1h", "--json", env=environment(daemon, PYTHONPATH=odd)
    )
    assert json.loads(told.stdout)["set"]["PYTHONPATH"].endswith(":/caf\xe9/\ufffd'")


def test_a_failure_leaves_nothing_to_evaluate(daemon: Daemon) -> None:
    ran = run(daemon, f"{GPULEASE} hold --mem 30G")
    assert (ran.returncode, ran.stdout) == (125, "")
    assert "30G" in ran.stderr

    daemon.submit("--mem", "8G", "--gpus", "2", "--", "sleep", "1000")
    ran = run(daemon, f"{GPULEASE} hold --mem 1G --no-wait")
    assert (ran.returncode, ran.stdout) == (75, "")


def test_one_inside_another_is_refused_until_that_is_given_back(daemon: Daemon) -> None:
    ran = run(
        daemon, f'eval "$({GPULEASE} hold --mem 1G)"; first=$GPULEASE_JOB\n'
        f"{GPULEASE} hold --mem 1G && exit 1\n"
        f"{GPULEASE} cancel $first >/dev/null\n"
        f'until {GPULEASE} show $first | grep -q released; do :; done\n'
        f'eval "$({GPULEASE} hold --mem 2G)"\n'
        'test $first != $GPULEASE_JOB && echo $GPULEASE_MEMORY'
    )  # fmt: skip
    assert re.search("job 1 .*\n\nhint: ", ran.stderr)
    assert ran.stdout.split() == [str(2 * G)]


@pytest.mark.parametrize("whom", ["--pid $$", "--for 1h", ""])
def test_one_inside_a_job_is_refused_also_where_the_job_hides_that_it_is_one(
    daemon: Daemon, whom: str
) -> None:
    hidden = f"env -u GPULEASE_JOB -u GPULEASE_WORKER {GPULEASE} hold --mem 1G {whom}"
    ran = daemon.run(
        "run", "--mem", "1G", "--", "sh", "-c", f"{hidden}; exit $?",
        check=False, env=environment(daemon),
    )  # fmt: skip
    assert (ran.returncode, ran.stdout) == (125, "")
    assert re.search("process .*job 1.*\n\nhint: ", ran.stderr)
    listed = daemon.jobs()
    assert [job["id"] for job in listed] == [1]


def test_nobody_holds_a_lease_for_a_process_of_a_job_from_outside(daemon: Daemon) -> None:
    job = daemon.submit("--mem", "1G", "--", "sleep", "1000")
    pid = daemon.wait_until(job, "active")["pid"]
    ran = daemon.run("hold", "--mem", "1G", "--pid", str(pid), check=False)
    assert ran.returncode == 125
    assert mentions(ran.stderr, f"process {pid}", f"job {job}")


def test_typed_without_eval_it_is_refused_before_it_leases_anything(daemon: Daemon) -> None:
    ours, theirs = pty.openpty()
    process = daemon.open(
        "hold", "--mem", "1G", "--for", "1h", stdin=theirs, stdout=theirs, stderr=theirs,
        env=environment(daemon),
    )  # fmt: skip
    os.close(theirs)
    shown = ""
    try:
        while piece := os.read(ours, 1 << 16).decode():
            shown += piece
    except OSError:
        pass  # the other end is closed: that is all
    os.close(ours)
    assert process.wait() == 2
    assert mentions(shown.replace("\r\n", " "), "hint: ", 'eval "$(gpulease hold ...)"')
    assert daemon.jobs() == []


def test_a_reader_that_leaves_gets_no_lease(daemon: Daemon) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    process = daemon.open("hold", "--mem", "1G", stdout=theirs, env=environment(daemon))
    os.close(theirs)
    assert process.wait(120) == 141
    assert daemon.wait_until(1, "ended")["outcome"] in ("released", "cancelled")


NASTY = {
    "PLAIN": "as it is",
    "QUOTES": """'single' "double" `ticks` $HOME \\n \\""",
    "TWO_LINES": "one\ntwo\n\n",
    "BYTES": os.fsdecode(b"caf\xc3\xa9 \xff"),
    "GLOB": '[{"a":1}] * ? ~ ! # ; & |',
    "EMPTY": "",
}


@pytest.mark.parametrize("shell", [*SHELLS, *filter(shutil.which, ("fish", "tcsh", "csh"))])
def test_every_value_arrives_as_it_is(shell: str) -> None:
    syntax = syntax_of(shell, None)
    script = statements(NASTY | {"not a name": "x"}, ["GONE", "%bad"], syntax)
    python = f'"{sys.executable}" -c "import os; print(dict(os.environ))"'

    ran = subprocess.run(
        command(shell, f"{script}\n{python}"), env=PLAIN | {"GONE": "1"}, capture_output=True,
        text=True, errors="surrogateescape", check=False,
    )  # fmt: skip

    assert ran.returncode == 0, ran.stderr
    found = eval(ran.stdout)
    assert {name: found[name] for name in NASTY} == NASTY
    assert "GONE" not in found


@pytest.mark.parametrize(
    ("program", "login_shell", "syntax"),
    [
        ("bash", "/usr/bin/fish", "sh"),
        ("-zsh", None, "sh"),
        ("fish", "/bin/bash", "fish"),
        ("tcsh", None, "csh"),
        ("python3", "/usr/bin/fish", "fish"),
        ("python3", "/bin/bash", "sh"),
        (None, None, "sh"),
    ],
)
def test_the_language_is_that_of_the_shell_that_asks(
    program: str | None, login_shell: str | None, syntax: str
) -> None:
    assert syntax_of(program, login_shell) == syntax


def test_what_is_run_in_a_held_shell_runs_within_the_lease_that_it_holds(daemon: Daemon) -> None:
    job = "sh -c 'echo $GPULEASE_JOB $GPULEASE_MEMORY'"
    ran = run(
        daemon,
        f'eval "$({GPULEASE} hold --mem 3G)"; {GPULEASE} run --mem 1G {job}\n'
        f"{GPULEASE} cancel $GPULEASE_JOB >/dev/null\n"
        f"until {GPULEASE} show 1 | grep -q released; do :; done\n"
        f"{GPULEASE} run --mem 1G {job}",
    )
    assert ran.stdout.splitlines() == [f"1 {G}", f"2 {G}"]
    assert mentions(ran.stderr, "gpulease: ", "job 1: 1G", "1 GPU")
