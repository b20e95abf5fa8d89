"""Which deliberate defects do the quick tests find? `python -m benchmarks.defects [--seed N]`.

Each defect is one change of a copy of the checkout: a comparison that is turned around, a condition
that is negated, a call that is left out, a number that is one too large. The seed chooses them, as
many in each package of gpulease/. The quick tests run tier by tier until one fails, those that name
the changed module, or a function or a class of it, first. A defect that no tier finds is a
question: does it change what a user gets?
"""

import argparse
import ast
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_REPOSITORY = Path(__file__).resolve().parents[1]
_TIERS = ("unit", "component", "smoke")
_LONG_NAME = 8
"""A shorter name is a word of other things, too."""
_LONGEST_S = 900
"""Seconds that one tier may take; a defect that makes a test hang is found by it."""
_TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip


@dataclass(frozen=True)
class Defect:
    """A node of a file, and the text that replaces it."""

    file: Path
    node: ast.expr
    text: str

    def __str__(self) -> str:
        was = ast.unparse(self.node).replace("\n", " ")
        return f"{self.file}:{self.node.lineno}: {was[:60]} -> {self.text[:60]}"

    def applied(self, source: str) -> str:
        """Return the source with the defect; columns of `ast` are bytes of UTF-8."""
        lines = source.encode().splitlines(keepends=True)
        first, last = self.node.lineno - 1, (self.node.end_lineno or self.node.lineno) - 1
        before, after = (
            lines[first][: self.node.col_offset],
            lines[last][self.node.end_col_offset :],
        )
        lines[first : last + 1] = [before + self.text.encode() + after]
        return b"".join(lines).decode()


def _defects(file: Path, source: str) -> Iterator[Defect]:
    """Yield what can be made wrong in the functions of a file."""
    functions = (
        each
        for each in ast.walk(ast.parse(source))
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    for node in {id(inner): inner for each in functions for inner in ast.walk(each)}.values():
        match node:
            case ast.Compare(ops=[operator]):
                turned = ast.Compare(node.left, [_TURNED[type(operator)]()], node.comparators)
                yield Defect(file, node, f"({ast.unparse(turned)})")
            case ast.BoolOp(op=operator):
                other = ast.Or() if isinstance(operator, ast.And) else ast.And()
                yield Defect(file, node, f"({ast.unparse(ast.BoolOp(other, node.values))})")
            case ast.If(test=test) | ast.IfExp(test=test):
                yield Defect(file, test, f"(not ({ast.unparse(test)}))")
            case ast.Expr(value=ast.Call() as call):
                yield Defect(file, call, "None")
            case ast.Constant(value=int(number)) if not isinstance(number, bool):
                yield Defect(file, node, str(number + 1))


def chosen(seed: int, number: int) -> list[Defect]:
    """Return defects of all packages in turn; a file counts by its length."""
    chance = random.Random(seed)
    packages: dict[str, list[Defect]] = {}
    for path in sorted((_REPOSITORY / "gpulease").rglob("*.py")):
        file = path.relative_to(_REPOSITORY)
        package = file.parts[1] if len(file.parts) > 2 else "(modules)"
        packages.setdefault(package, []).extend(_defects(file, path.read_text(encoding="utf-8")))
    drawn = [chance.sample(found, number) for found in packages.values() if len(found) >= number]
    return [defect for each in zip(*drawn, strict=True) for defect in each][:number]


def _run(checkout: Path, files: list[str]) -> str | None:
    """Return the first test that fails, "a test that hangs", or None if all pass."""
    command = [
        sys.executable, "-m", "pytest", "--quiet", "--exitfirst", "--numprocesses", "2",
        "-m", "not slow", "-p", "no:cacheprovider", "--no-header", *files,
    ]  # fmt: skip
    process = subprocess.Popen(
        command, cwd=checkout, env={**os.environ, "PYTHONPATH": str(checkout)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=_LONGEST_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return "a test that hangs"
    if process.returncode in (0, 5):  # 5: none of the files has a quick test
        return None
    failed = (line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR ")))
    return next(failed, "the collection of tests").split(" - ")[0]


def found_by(defect: Defect, checkout: Path) -> str | None:
    """Return the first test that finds a defect in a copy of the checkout; None: no quick test."""
    path = checkout / defect.file
    source = path.read_text(encoding="utf-8")
    path.write_text(defect.applied(source), encoding="utf-8")
    try:
        for tier in _TIERS:
            files = sorted((checkout / "tests" / tier).glob("test_*.py"))
            near = [str(each) for each in files if _names(each, defect.file, source)]
            far = [str(each) for each in files if str(each) not in near]
            for some in (near, far):
                if some and (test := _run(checkout, some)):
                    return test
        return None
    finally:
        path.write_text(source, encoding="utf-8")


def _names(test: Path, file: Path, source: str) -> bool:
    module = ".".join(file.with_suffix("").parts)
    text = test.read_text(encoding="utf-8")
    if module in text or f"{'.'.join(file.parts[:-1])} import {file.stem}" in text:
        return True
    definitions = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    names = {each.name for each in ast.parse(source).body if isinstance(each, definitions)}
    return any(len(name) >= _LONG_NAME and name in text for name in names)


def main() -> None:
    """Try the defects one after the other, and print what found each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=24)
    parser.add_argument("--number", type=int, default=30)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder) / "checkout"
        left_out = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", ".hypothesis")
        shutil.copytree(_REPOSITORY, checkout, ignore=left_out)
        defects = chosen(asked.seed, asked.number)
        missed = 0
        for number, defect in enumerate(defects, 1):
            test = found_by(defect, checkout)
            missed += test is None
            print(f"{number:3} {defect}\n      {test or 'NOT FOUND'}", flush=True)
    print(f"{len(defects) - missed} of {len(defects)} defects found by the quick tests")


if __name__ == "__main__":
    main()
