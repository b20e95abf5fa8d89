"""What people read, compared with files kept in tests/golden: nothing else asserts exact wording.

`GPULEASE_GOLDEN=write make unit PYTEST='-n 0'` writes them; review the difference.
"""

import os
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden"
SENTENCES = GOLDEN / "sentences.txt"


def compare(name: str, text: str) -> None:
    """Assert that `text` is what the file `name` says."""
    path = GOLDEN / f"{name}.txt"
    if _writes():
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def sentence(name: str, text: str | None) -> None:
    """Assert that `text` is the paragraph under `name` in the file of all sentences."""
    known = _sentences()
    if _writes():
        known[name] = text or ""
        SENTENCES.write_text(
            "".join(f"== {each}\n{known[each]}\n" for each in sorted(known)), encoding="utf-8"
        )
    assert text == known.get(name), name


def mentions(text: str | None, *words: str) -> bool:
    """Return whether each of these words (numbers, names, options) occurs in a text."""
    return all(word in (text or "") for word in words)


def _sentences() -> dict[str, str]:
    found = {}
    for block in SENTENCES.read_text(encoding="utf-8").split("== ")[1:]:
        name, _, text = block.partition("\n")
        found[name] = text.removesuffix("\n")
    return found


def _writes() -> bool:
    return os.environ.get("GPULEASE_GOLDEN") == "write"
