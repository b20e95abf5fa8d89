"""Nothing in the package is ever given to a shell to read."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "gpulease"
_OF_SHELLS = {"system", "popen", "getoutput", "getstatusoutput", "create_subprocess_shell"}
_STARTS = {"Popen", "run", "call", "check_call", "check_output"}


def shells(source: str) -> Iterator[str]:
    """Yield each call that a shell would read something of."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        of = getattr(getattr(node.func, "value", None), "id", "")
        with_shell = name in _STARTS and any(word.arg == "shell" for word in node.keywords)
        if name in _OF_SHELLS or with_shell:
            yield ast.unparse(node)
        first = node.args[0] if node.args else None
        is_text = isinstance(first, ast.JoinedStr) or (
            isinstance(first, ast.Constant) and isinstance(first.value, str)
        )
        if of == "subprocess" and name in _STARTS and is_text:
            yield ast.unparse(node)


def test_no_call_is_read_by_a_shell() -> None:
    sources = sorted(PACKAGE.rglob("*.py"))
    assert len(sources) > 100
    found = {str(each): calls for each in sources if (calls := list(shells(each.read_text())))}
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "subprocess.run(x, shell=True)",
        "os.system(x)",
        "os.popen(x)",
        "subprocess.Popen('ls -l')",
        "subprocess.check_output(f'ls {x}')",
        "asyncio.create_subprocess_shell(x)",
    ],
)
def test_such_a_call_would_be_found(source: str) -> None:
    assert list(shells(source))
