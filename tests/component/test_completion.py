"""What the shells complete, asked of the real shells; what the daemon knows is a stand-in's."""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from daemon_stand_in import views
from daemon_stand_in.daemon import StandIn
from gpulease.cli import verbs
from gpulease.cli.completion import script
from gpulease.wire.notifications import EVENTS_OF_JOBS

PATIENCE_S = 20.0


@pytest.fixture
def daemon(daemon: StandIn) -> StandIn:
    import pwd

    me = pwd.getpwuid(os.geteuid()).pw_name
    daemon.status = views.busy_status()
    for job in (
        views.running(12, name="resnet: 50 'x' $(touch evil)", user=me),
        views.waiting(),
        views.over(170, user=me, name="eval"),
    ):
        daemon.jobs[job.id] = replace(job, user=me)
    return daemon


class Shell:
    """A folder to complete in, with a `gpulease` on the PATH that asks the stand-in."""

    def __init__(self, folder: Path, socket: Path) -> None:
        self.folder = folder
        programs = folder / "bin"
        programs.mkdir()
        here = Path(__file__).parents[2]
        command = programs / "gpulease"
        command.write_text(
            f'#!/bin/sh\nPYTHONPATH={here} exec {sys.executable} -m gpulease.cli "$@"\n'
        )
        command.chmod(0o755)
        (folder / "home").mkdir()
        work = folder / "work"
        work.mkdir()
        (work / "train.py").touch()
        (work / "two words.py").touch()
        self.work = work
        self.environment = {
            "PATH": f"{programs}:/usr/bin:/bin",
            "HOME": str(folder / "home"),
            "GPULEASE_SOCKET": str(socket),
            "TERM": "dumb",
            "LC_ALL": "C.UTF-8",
        }

    def written(self, shell: str) -> Path:
        path = self.folder / f"completion.{shell}"
        path.write_text(script(shell))
        return path

    def call(self, *line: str) -> list[str]:
        done = subprocess.run(
            line, env=self.environment, cwd=self.work, capture_output=True, text=True,
            timeout=PATIENCE_S, check=False,
        )  # fmt: skip
        assert done.stderr == "", done
        return done.stdout.splitlines()

    def bash(self, *words: str, kind: int = 9, prelude: str = "") -> list[str]:
        """Return what bash is given for the last of `words`; as readline it takes "=" apart."""
        needs("bash")
        drive = (
            f"{prelude}\nsource {self.written('bash')}\n"
            'COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMP_LINE="$*"\n'
            f"COMP_POINT=${{#COMP_LINE}} COMP_TYPE={kind}\n"
            'compopt() { :; }\n_gpulease gpulease "${COMP_WORDS[COMP_CWORD]}" ""\n'
            '((${#COMPREPLY[@]})) && printf "%s\\n" "${COMPREPLY[@]}"\nexit 0'
        )
        return self.call("bash", "--norc", "-c", drive, "bash", "gpulease", *words)

    def fish(self, line: str) -> list[str]:
        needs("fish")
        return self.call(
            "fish",
            "--no-config",
            "-c",
            f"source {self.written('fish')}; complete -C $argv[1]",
            line,
        )

    def zsh(self, typed: str, until: str) -> str:
        """Type into a zsh on a terminal, press Tab, and return the screen once it shows `until`."""
        needs("zsh")
        (self.folder / "home" / ".zshrc").write_text(
            "PS1='ready> '; unsetopt beep list_ambiguous; autoload -Uz compinit && compinit -u -D\n"
            f"zstyle ':completion:*' menu no\nsource {self.written('zsh')}\n"
        )
        pid, terminal = pty.fork()
        if pid == 0:
            os.chdir(self.work)
            os.execvpe("zsh", ["zsh", "-i"], {**self.environment, "TERM": "vt100"})
        try:
            read_until(terminal, "ready> ")
            os.write(terminal, typed.encode() + b"\t")
            return read_until(terminal, until)
        finally:
            os.close(terminal)
            os.waitpid(pid, 0)


def needs(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")


def read_until(terminal: int, text: str) -> str:
    """Return what a terminal has shown, without colours and moves, once it has shown `text`."""
    read, shown, deadline = b"", "", time.monotonic() + PATIENCE_S
    while text not in shown:
        left = deadline - time.monotonic()
        assert left > 0 and select.select([terminal], [], [], left)[0], shown
        read += os.read(terminal, 65536)
        shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\r", "", read.decode(errors="replace"))
    return shown


@pytest.fixture
def shell(tmp_path: Path, daemon: StandIn) -> Shell:
    return Shell(tmp_path, daemon.path)


VERBS = list(verbs.VERBS)


def test_bash_completes_verbs(shell: Shell) -> None:
    assert shell.bash("") == VERBS
    assert shell.bash("sta") == ["status"]
    assert shell.bash("--socket", "/x", "sho") == ["show"]
    assert shell.bash("--so") == ["--socket"]


def test_bash_completes_the_options_of_the_verb(shell: Shell) -> None:
    assert shell.bash("run", "--me") == ["--mem"]
    assert "--mem" not in shell.bash("list", "--")
    assert {"-f", "--follow", "--tail", "-h", "--help"} <= set(shell.bash("logs", "-"))
    assert shell.bash("run", "--visible", "") == ["uuid", "index"]
    assert shell.bash("run", "--visible", "=", "i") == ["index"]
    assert shell.bash("list", "--state", "=") == shell.bash("list", "--state", "")
    assert shell.bash("list", "--state", "time") == ["time-limit"]
    assert shell.bash("run", "--mem", "") == []


def test_bash_completes_the_jobs_that_a_verb_is_about(shell: Shell) -> None:
    assert shell.bash("cancel", "") == ["12", "17"]
    assert shell.bash("cancel", "12", "1") == ["12", "17"]
    assert shell.bash("show", "") == ["12", "17", "170"]
    assert shell.bash("show", "17") == ["17", "170"]
    assert shell.bash("logs", "-f", "") == ["12", "170"]
    assert shell.bash("attach", "") == ["12"]
    assert shell.bash("logs", "12", "1") == ["12", "170"]
    assert shell.bash("completion", "bash", "") == []


def test_bash_completes_files_and_commands_after_run(shell: Shell) -> None:
    assert shell.bash("run", "--mem", "4G", "t") >= ["train.py"]
    assert "train.py" in shell.bash("run", "--mem", "=", "4G", "tr")
    assert shell.bash("run", "two") == ["two words.py"]
    assert "true" in shell.bash("run", "--", "tru")
    assert shell.bash("run", "-d", "./tr") == ["./train.py"]


def test_bash_leaves_what_follows_the_command_to_the_command(shell: Shell) -> None:
    seen = '_command_offset() { COMPREPLY=("at $1: ${COMP_WORDS[*]:$1}"); }'
    words = ("run", "--mem", "=", "4G", "-d", "--", "git", "--he")
    assert shell.bash(*words, prelude=seen) == ["at 7: git --he"]
    assert shell.bash("run", "train.py", "--mem", "", prelude=seen) == ["at 2: train.py --mem "]


def test_bash_on_a_terminal_inserts_what_is_completed(shell: Shell) -> None:
    needs("bash")
    (shell.folder / "home" / ".bashrc").write_text(
        f"PS1='ready> '; source {shell.written('bash')}\n"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(shell.work)
        os.execvpe("bash", ["bash", "-i"], {**shell.environment, "TERM": "vt100"})
    try:
        read_until(terminal, "ready> ")
        os.write(terminal, b"echo gpulease; gpulease sh\t")
        read_until(terminal, "gpulease show ")
        os.write(terminal, b"170\t\t\x15gpulease run --visible=in\t")
        read_until(terminal, "--visible=index ")
        os.write(terminal, b"\x15gpulease run two\t")
        read_until(terminal, "two\\ words.py ")
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)


def test_fish_completes_verbs_options_and_jobs(shell: Shell) -> None:
    assert {line.split("\t")[0] for line in shell.fish("gpulease ")} == set(VERBS)
    assert shell.fish("gpulease run --me") == [
        "--mem\tMemory on each GPU: 4G, 40%; 4G..10G: more while free"
    ]
    assert shell.fish("gpulease run --visible=i")[0].startswith("--visible=index")
    assert shell.fish("gpulease run --visible i")[0].startswith("index")
    assert [line.split("\t")[0] for line in shell.fish("gpulease cancel ")] == ["12", "17"]
    assert [line.split("\t")[0] for line in shell.fish("gpulease cancel 12 ")] == ["12", "17"]
    assert shell.fish("gpulease completion bash ") == []
    assert shell.fish("gpulease show 170")[0].startswith("170\teval, exited, ")
    assert "resnet: 50 'x' $(touch evil), active" in shell.fish("gpulease attach ")[0]


def test_fish_completes_the_command_as_its_own(shell: Shell) -> None:
    assert "train.py" in shell.fish("gpulease run --mem 4G tra")
    assert any(line.startswith("true") for line in shell.fish("gpulease run tru"))
    own = [line.split("\t")[0] for line in shell.fish("gpulease run -d -- gpulease sta")]
    assert own == ["status"]
    assert "train.py" in shell.fish("gpulease run --mem 4G python tra")


@pytest.mark.parametrize(
    ("typed", "becomes"),
    [
        ("gpulease run --visible=in", "gpulease run --visible=index"),
        ("gpulease run --mem 4G trai", "gpulease run --mem 4G train.py"),
        ("gpulease run -d -- gpulease statu", "gpulease run -d -- gpulease status"),
        ("gpulease attach ", "gpulease attach 12"),
    ],
)
def test_zsh_on_a_terminal_inserts_what_is_completed(
    shell: Shell, typed: str, becomes: str
) -> None:
    assert becomes in shell.zsh(typed, becomes)


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_the_script_that_is_printed_is_understood_by_its_shell(shell: Shell, name: str) -> None:
    needs(name)
    printed = shell.call("gpulease", "completion", name)
    assert printed == shell.written(name).read_text().splitlines()
    assert shell.call(name, "-n", str(shell.written(name))) == []


def ask(shell: Shell, *words: str, **changed: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["gpulease", "__complete", *words], env={**shell.environment, **changed},
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip


def candidates(shell: Shell, *words: str) -> list[str]:
    action, *lines = ask(shell, *words).stdout.splitlines()
    assert action == "words"
    return [line.partition("\t")[0] for line in lines]


def test_gpus_are_completed_by_index(shell: Shell) -> None:
    assert ask(shell, "drain", "").stdout.splitlines() == [
        "words",
        "0\tNVIDIA RTX 6000 Ada Generation, available",
        "1\tNVIDIA RTX 6000 Ada Generation, drained",
        "2\tNVIDIA RTX 6000 Ada Generation, unreadable",
    ]
    assert candidates(shell, "drain", "1") == ["1"]


def test_events_are_completed_one_after_another(shell: Shell) -> None:
    assert candidates(shell, "run", "--notify", "") == [*EVENTS_OF_JOBS, "all", "none"]
    assert candidates(shell, "run", "--notify", "fail,o") == ["fail,oom", "fail,over-lease"]


def test_what_the_shell_knows_is_left_to_it(shell: Shell) -> None:
    assert ask(shell, "--socket", "").stdout == "files\n"
    assert ask(shell, "run", "--mem", "4G", "t").stdout == "program\n"
    assert ask(shell, "run", "--mem", "4G", "git", "-").stdout == "command 4\n"


@pytest.mark.parametrize("words", [("show", ""), ("drain", ""), ("nonsense", ""), ("run", "--x=")])
def test_without_a_daemon_nothing_is_said_and_none_is_started(
    no_daemon_of_the_machine: None, shell: Shell, words: tuple[str, ...]
) -> None:
    home = shell.folder / "home"
    done = ask(shell, *words, GPULEASE_SOCKET="", XDG_RUNTIME_DIR=str(home))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(home.iterdir()) == []


def test_a_daemon_that_does_not_answer_is_not_waited_for(shell: Shell, tmp_path: Path) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "silent"))
        silent.listen(1)
        done = ask(shell, "--socket", str(tmp_path / "silent"), "show", "")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
