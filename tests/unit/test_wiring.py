"""The composition root: parts are complete when they are constructed."""

import ast
from pathlib import Path

import pytest

from gpulease import daemon

ROOT = Path(daemon.__file__).parent


def functions(module: str) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = ast.parse((ROOT / f"{module}.py").read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


@pytest.mark.parametrize("module", ["app", "foundation", "enforcement_setup"])
def test_no_part_is_changed_after_its_construction_except_by_a_reload(module: str) -> None:
    for function in functions(module):
        changed = [
            ast.unparse(target)
            for node in ast.walk(function)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Attribute)
        ]
        if function.name not in ("__init__", "replace", "adopt"):
            assert not changed, function.name


@pytest.mark.parametrize("module", ["app", "foundation", "enforcement_setup", "serve", "doctor"])
def test_the_functions_of_the_composition_root_fit_on_a_page(module: str) -> None:
    for function in functions(module):
        assert (function.end_lineno or 0) - function.lineno < 45, function.name
