"""Write the manual pages into a directory: python docs/man.py DIRECTORY

Those of the verbs come from their declarations, those of the other programs from their --help, and
gpulease.toml(5) from docs/admin/configuration.md. The format is roff, see man(7).
"""

import os
import re
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer

from gpulease import __version__
from gpulease.cli.commands import app
from gpulease.daemon.main import _parser as daemon_parser
from gpulease.setup.__main__ import _parser as setup_parser
from gpulease.web.main import _parser as web_parser

CONFIGURATION = Path(__file__).parent / "admin/configuration.md"
PROGRAMS = {
    "gpuleased": ("the daemon that leases GPU memory", daemon_parser),
    "gpulease-setup": ("install gpulease for a machine, or remove it", setup_parser),
    "gpulease-web": ("a read-only web page about GPUs, jobs and the queue", web_parser),
}


def pages() -> Iterator[tuple[str, str]]:
    """Yield the name of the file of each page, and its text."""
    verbs: Any = typer.main.get_command(app)
    context = typer.Context(verbs, info_name="gpulease", help_option_names=["-h", "--help"])
    commands = [verbs.get_command(context, verb) for verb in verbs.list_commands(context)]
    rows = "".join(_item(f"gpulease-{each.name}(1)", each.short_help) for each in commands)
    text = _verb(verbs, context, "", "share GPUs by memory")
    yield "gpulease.1", f"{text}.SH COMMANDS\n{rows}{_see_also('gpulease')}"
    for each in commands:
        text = _verb(each, context, each.name, each.short_help)
        yield f"gpulease-{each.name}.1", text + _see_also(f"gpulease-{each.name}")
    for name, (about, parser) in PROGRAMS.items():
        yield f"{name}.8", _program(name, about, parser())
    head = _head("gpulease.toml", 5, "configuration of gpuleased, in /etc/gpulease/config.toml")
    yield "gpulease.toml.5", head + ".SH DESCRIPTION\n" + _from_markdown(CONFIGURATION.read_text())


def _verb(command: Any, parent: Any, verb: str, about: str) -> str:
    name = f"gpulease-{verb}" if verb else "gpulease"
    context = typer.Context(command, info_name=verb, parent=parent) if verb else parent
    usage = f"gpulease {verb} {' '.join(command.collect_usage_pieces(context))}"
    text = _head(name, 1, about) + f".SH SYNOPSIS\n{_roff(usage)}\n.SH DESCRIPTION\n"
    text += "".join(map(_paragraph, command.help.split("\n\n")))
    sections: dict[str, list[str]] = {}
    for param in command.get_params(context):
        heading = getattr(param, "rich_help_panel", None) or f"{param.param_type_name}s"
        if (row := param.get_help_record(context)) is not None:
            sections.setdefault(heading.upper(), []).append(_item(*row))
    return text + "".join(f".SH {title}\n{''.join(rows)}" for title, rows in sections.items())


def _program(name: str, about: str, parser: ArgumentParser) -> str:
    verbs = [each.choices for each in parser._actions if isinstance(each.choices, dict)]
    parsers = [parser, *(verb for choices in verbs for verb in choices.values())]
    text = "".join(_verbatim(each.format_help()) for each in parsers)
    return f"{_head(name, 8, about)}.SH DESCRIPTION\n{text}{_see_also(name)}"


def _see_also(name: str) -> str:
    others = {"gpulease(1)", "gpulease.toml(5)", "gpuleased(8)"} - {f"{name}(1)", f"{name}(8)"}
    return f".SH SEE ALSO\n{', '.join(sorted(others))}\n"


def _head(name: str, section: int, about: str) -> str:
    at = datetime.fromtimestamp(int(os.environ.get("SOURCE_DATE_EPOCH", "0")), UTC)
    title = f'.TH {name.upper()} {section} {at:%Y-%m-%d} "gpulease {__version__}"'
    line = f"{name} - {about[0].lower()}{about[1:].rstrip('.')}"
    return f"{title}\n.SH NAME\n{_roff(line)}\n"


def _paragraph(text: str) -> str:
    # \b: what follows keeps its lines.
    return _verbatim(text[2:]) if text.startswith("\b") else f".PP\n{_roff(text)}\n"


def _verbatim(text: str) -> str:
    return f".PP\n.nf\n{_roff(text.strip())}\n.fi\n"


def _item(names: str, text: str) -> str:
    return f".TP\n.B {_roff(names)}\n{_roff(text) or '.br'}\n"


def _roff(text: str) -> str:
    """Escape what roff would read as a request or an escape."""
    escaped = text.replace("\\", r"\e").replace("-", r"\-")
    return re.sub(r"^([.'])", r"\\&\1", escaped, flags=re.MULTILINE)


def _from_markdown(text: str) -> str:
    """Return a page of the documents: headings, tables of keys, code and paragraphs."""
    parts = []
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text.partition("\n\n")[2])
    for is_code, block in enumerate(re.split(r"^```\w*\n", text, flags=re.MULTILINE)):
        if is_code % 2:
            parts.append(_verbatim(block))
            continue
        for each in map(str.strip, re.sub(r"`|\*\*", "", block).split("\n\n")):
            if each.startswith("#"):
                parts.append(f".SH {_roff(each.lstrip('# ').upper())}\n")
            elif each.startswith("|"):
                parts.extend(_rows(each.splitlines()))
            elif each:
                parts.append(f".PP\n{_roff(each)}\n")
    return "".join(parts)


def _rows(lines: list[str]) -> Iterator[str]:
    """Yield the keys of a table, each with its default, and the other columns below."""
    heads, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    for key, *cells in rows:
        default, *rest = cells if heads[1:2] == ["default"] else ["", *cells]
        yield _item(key, "; ".join(filter(None, [default and f"Default: {default}", *rest])))


if __name__ == "__main__":
    os.environ["COLUMNS"] = "80"  # of argparse
    for file, page in pages():
        Path(sys.argv[1], file).write_text(page, encoding="utf-8")
