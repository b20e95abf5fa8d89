"""The documents name what exists: links, anchors, files, options, make targets and settings."""

import ast
import io
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stdout
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import pytest

from gpulease import __version__
from gpulease.cli.app import call
from gpulease.cli.help_page import SHORT
from gpulease.config import Settings, read_settings
from gpulease.units import parse_instant
from gpulease.worker.overhead import FRAMEWORKS

ROOT = Path(__file__).parents[2]
PAGES = sorted((*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")))

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
FILE = re.compile(
    r"(?:gpulease/[\w/]*(?:\.py|/)|(?:tests|docs|systemd|examples|migrations)/[\w./-]*)"
)
OPTION = re.compile(r"(?<![\w-])(--?[a-z][\w-]*)(?:[ =](?=[A-Z<])(\S+))?")
COMMAND_BEGINS = r"(?:^\s*(?:\$ )?|[;&|(] *|\bdo |\bsudo |\b[A-Z_]+=\S+ )"
PAGES_OF_USERS_FILES = {"notify.md", "run.md"}
"""Their settings belong into a user's own file, which has other keys than the daemon's."""
WORDS_THAT_END_A_COMMAND = {"|", "||", "&&", ";", "&", ">", "2>", "#"}


def names(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    found: set[str] = set()
    for heading in HEADING.findall(prose(page)):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-")
        found.add(slug if slug not in found else f"{slug}-1")
    return frozenset(found)


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    broken = [link for link in LINK.findall(prose(page)) if not leads_somewhere(page, link)]
    assert not broken


def leads_somewhere(page: Path, link: str) -> bool:
    if re.match(r"[a-z]+:", link):
        return True
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    return target.exists() and (not anchor or anchor in anchors(target))


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_every_file_of_the_project_that_is_named_exists(page: Path) -> None:
    named = {code for code in CODE.findall(prose(page)) if FILE.fullmatch(code)}
    assert not [name for name in sorted(named) if not (ROOT / name).exists()]


def test_each_version_in_the_changelog_has_a_date_and_the_newest_may_be_unreleased() -> None:
    newest, *others = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    dated = r", \d{4}-\d\d-\d\d"
    assert re.fullmatch(f"{re.escape(__version__)}({dated}|, unreleased)", newest)
    assert all(re.fullmatch(rf"[\d.]+{dated}", each) for each in others)


def test_every_framework_that_is_limited_is_in_the_table_with_a_test() -> None:
    limited, tested = (
        part.lower()
        for part in (ROOT / "docs/supported-frameworks.md").read_text().split("| tested with |")
    )
    for name in FRAMEWORKS:
        title = {"torch": "pytorch", "onnxruntime": "onnx runtime", "paddle": "paddlepaddle"}
        row = f"\n| {title.get(name, name)}"
        assert row in limited, name
        assert row in tested, name


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_every_make_target_that_is_named_exists(page: Path) -> None:
    targets = set(re.findall(r"^([\w.$()/-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    targets |= {target.replace("$(VENV)", ".venv") for target in targets}
    named = {words[1] for words in commands(page, "make") if words[1:]}
    assert not [
        name for name in named if re.fullmatch(r"[a-z.][\w./-]*", name) and name not in targets
    ]


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_every_option_that_is_named_exists(page: Path) -> None:
    wrong = []
    for program in ("gpulease", "gpuleased", "gpulease-setup"):
        for words in commands(page, program):
            wrong += [f"{' '.join(words)}: {word}" for word in unknown_words(words)]
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_python_and_settings_in_blocks_are_valid(page: Path, tmp_path: Path) -> None:
    for block in FENCE.findall(page.read_text(encoding="utf-8")):
        language, _, code = textwrap.dedent(block).removesuffix("```").partition("\n")
        if language == "```python":
            ast.parse(code)
        if language == "```toml":
            tomllib.loads(code)
        if language == "```toml" and page.name not in PAGES_OF_USERS_FILES:
            file = tmp_path / "config.toml"
            file.write_text(code, encoding="utf-8")
            read_settings(file, Settings(), {})


def commands(page: Path, program: str) -> Iterator[list[str]]:
    """Yield the calls of a program in a page, in blocks of code and within lines."""
    for snippet in snippets(page.read_text(encoding="utf-8")):
        for match in re.finditer(
            rf"{COMMAND_BEGINS}(?:[\w.~/-]*/)?({program}(?= |$)[^)]*)", snippet
        ):
            yield words_of(match[1])
        if program == "gpulease" and re.match(r"[a-z]+ --?[a-z]", snippet):
            words = words_of(f"gpulease {snippet}")
            yield from [words] * (options("gpulease", words[1]) is not None)


def snippets(text: str) -> Iterator[str]:
    for block in FENCE.findall(text):
        if not block.lstrip().startswith("```python"):
            yield from block.replace("\\\n", " ").splitlines()
    yield from CODE.findall(FENCE.sub("", text))


def words_of(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError:  # a quotation that ends on another line
        words = line.split()
    end = next((at for at, word in enumerate(words) if word in WORDS_THAT_END_A_COMMAND), None)
    return words[:end]


def unknown_words(words: list[str]) -> Iterator[str]:
    """Yield the verb or the options of a call that its program does not have."""
    program, *rest = words
    verb = rest.pop(0) if rest and re.fullmatch(r"[a-z]+", rest[0]) else ""
    known = options(program, verb)
    if known is None:
        yield verb
        return
    while rest and rest[0] != "--":
        word = rest.pop(0)
        name = word.partition("=")[0]
        if not name.startswith("-") or re.fullmatch(r"-\d\w*", name):
            if verb == "run":  # what follows the command is the command's
                return
        elif verb == "run" and known.get(name.replace("--no-", "--")) is False:
            continue  # each flag of run has an opposite
        elif name not in known:
            yield word
        elif known[name] and "=" not in word and rest:
            rest.pop(0)


@cache
def options(program: str, verb: str) -> dict[str, bool] | None:
    """Return the options in a verb's help, and whether each takes a value; None: no such verb."""
    said = help_of(program, verb)
    if said is None:
        return None
    found: dict[str, bool] = {}
    for line in said.splitlines():
        # `-d, --detach` and `--pty / --no-pty`: what follows the last name holds for all.
        listed = OPTION.findall(re.split(r" {2,}", line.strip())[0])
        for name, _ in listed if line.lstrip().startswith("-") else []:
            found[name] = bool(listed[-1][1])
    return found | {"--help": False, "--help-all": False, "--version": False}


def help_of(program: str, verb: str) -> str | None:
    line = [*([verb] if verb else []), "--help-all" if verb in SHORT else "--help"]
    if program == "gpulease":
        with redirect_stdout(io.StringIO()) as said:
            return said.getvalue() if call(line) == 0 else None
    path = Path(sys.executable).with_name(program)
    done = subprocess.run([path, *line], check=False, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else None


INSTANT = re.compile(r"--(?:from|begin) (?:'([^']+)'|(now|\+\w+|\d[\d:]*))")


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_points_in_time_can_be_read(page: Path) -> None:
    for quoted, bare in INSTANT.findall(page.read_text(encoding="utf-8")):
        parse_instant(quoted or bare, datetime.now(UTC))
