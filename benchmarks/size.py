"""How large the code is: `python -m benchmarks.size [CHECKOUT]`, which `make size` runs.

It reads the source only, with the standard library only, so that it measures any checkout. A figure
that misses its goal is no failure: the goals say where the code should arrive, and lines are the
measure of saying everything once, not the aim. `make contracts` finds circles of imports.
"""

import ast
import io
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from benchmarks.figures import Figure, table

_SHORT = 60
"""A file with fewer lines needs a reason: a table, a protocol, an entry point."""
_SPREAD = {"exclusive": 21, "time_limit": 28}
"""Words of options, and how many files named them while each option was written once."""
_NO_CODE = {
    tokenize.COMMENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER, tokenize.INDENT,
    tokenize.NEWLINE, tokenize.NL,
}  # fmt: skip


@dataclass(frozen=True)
class Source:
    """A file of Python; `module` is its name with dots."""

    module: str
    text: str
    is_package: bool

    @cached_property
    def lines(self) -> int:
        return self.text.count("\n")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def tokens(self) -> list[tokenize.TokenInfo]:
        return list(tokenize.generate_tokens(io.StringIO(self.text).readline))

    @cached_property
    def code(self) -> int:
        """The lines that are not blank, and no comment or docstring, nor a part of one."""
        spans = ((each.start[0], each.end[0]) for each in self.tokens if each.type not in _NO_CODE)
        used = {line for first, last in spans for line in range(first, last + 1)}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                used -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        written = self.text.split("\n")
        return sum(bool(written[line - 1].strip()) for line in used)

    @cached_property
    def comments(self) -> int:
        """The lines that are comments and nothing else."""
        return sum(
            each.type == tokenize.COMMENT and each.line.lstrip().startswith("#")
            for each in self.tokens
        )

    @cached_property
    def names(self) -> Counter[str]:
        return Counter(each.string for each in self.tokens if each.type == tokenize.NAME)

    @cached_property
    def private_functions(self) -> list[str]:
        """The functions and methods with a leading underscore, by their names."""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        defined = [node.name for node in ast.walk(self.tree) if isinstance(node, kinds)]
        return [name for name in defined if name.startswith("_") and not name.endswith("__")]


def sources(root: Path, package: str) -> list[Source]:
    """Return the files of Python below a folder of a checkout."""
    return [_source(root, path) for path in sorted((root / package).rglob("*.py"))]


def _source(root: Path, path: Path) -> Source:
    *parents, name = path.relative_to(root).with_suffix("").parts
    is_package = name == "__init__"
    module = ".".join(parents if is_package else [*parents, name])
    return Source(module, path.read_text(), is_package)


def by_package(files: Iterable[Source]) -> Iterator[str]:
    """Yield a line for each package, and one for all."""
    packages: dict[str, list[Source]] = defaultdict(list)
    for each in files:
        _, *parts = each.module.split(".")
        is_inside = len(parts) > 1 or (parts and each.is_package)
        packages[parts[0] if is_inside else "(modules)"].append(each)
    every = [each for inside in packages.values() for each in inside]
    yield f"{'package':<12} {'files':>6} {f'under {_SHORT}':>9} {'lines':>8} {'code':>8}"
    largest = sorted(packages, key=lambda name: -sum(each.lines for each in packages[name]))
    for name in [*largest, "all"]:
        inside = packages.get(name, every)
        short = sum(each.lines < _SHORT for each in inside)
        lines, code = sum(each.lines for each in inside), sum(each.code for each in inside)
        yield f"{name:<12} {len(inside):>6} {short:>9} {lines:>8,} {code:>8,}"


def figures(files: list[Source], tests: list[Source]) -> Iterator[Figure]:
    """Yield what has a goal."""
    code = sum(each.code for each in files)
    yield Figure("lines of gpulease/", sum(each.lines for each in files), "", 62_000)
    yield Figure("its code, without blanks, comments and docstrings", code, "", 42_000)
    yield Figure("its files", len(files), "", 330)
    yield Figure("lines of tests/", sum(each.lines for each in tests), "", 50_000)
    for word, goal in _SPREAD.items():
        named = sum(re.search(rf"\b{word}\b", each.text) is not None for each in files)
        yield Figure(f"files that name {word}", named, "", goal)
    private = [each.names[name] for each in files for name in each.private_functions]
    once = 100 * sum(named == 2 for named in private) / max(1, len(private))
    # As in httpx, which has 6 comments for 100 lines; huey has 39 % and 5.
    yield Figure("private functions named once besides their definition", once, "%", 44)
    comments = 100 * sum(each.comments for each in files) / max(1, code)
    yield Figure("comments for 100 lines of code", comments, "", 5, higher_is_better=True)


def main(arguments: list[str]) -> int:
    """Print the size of a checkout, by default of this one."""
    root = Path(arguments[0]) if arguments else Path(__file__).parents[1]
    files, tests = sources(root, "gpulease"), sources(root, "tests")
    print(*by_package(files), "", *table(list(figures(files, tests))), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
