"""Write the pages of docs/ that are drawn from the code, or check that they are as drawn.

python docs/generate.py          write them
python docs/generate.py --check  exit 1 if one is not as the code is now
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from gpulease.domain.lease import HOLDS_MEMORY, IGNORED, TRANSITIONS, State
from gpulease.domain.xid import SOURCES, XIDS, Blame
from gpulease.errors import BY_CODE

HERE = Path(__file__).parent
NOTE = "<!-- Written by docs/generate.py: change the code, not this page. -->\n\n"


def states() -> Iterator[str]:
    yield "# The life of a lease\n\n"
    yield "Drawn from the table in `gpulease/domain/lease.py`, the one place that moves a lease.\n"
    yield "All leases of a job move together.\n\n```mermaid\nstateDiagram-v2\n    [*] --> queued\n"
    for (state, trigger), target in TRANSITIONS.items():
        yield f"    {state} --> {target}: {trigger}\n"
    yield "    ended --> [*]\n```\n\n"
    held = ", ".join(f"`{state}`" for state in State if state in HOLDS_MEMORY)
    yield f"Memory is held in the states {held}.\n\n"
    yield "News that comes late or twice, and is ignored on purpose:\n\n"
    yield "| in the state | the news |\n|---|---|\n"
    for state, trigger in sorted(IGNORED):
        yield f"| {state} | {trigger} |\n"


def errors() -> Iterator[str]:
    yield "# The errors\n\nEach is a sentence and mostly a hint; programs go by the code.\n\n"
    yield "| code | what it means | HTTP status | exit code |\n|---|---|---|---|\n"
    for code, kind in sorted(BY_CODE.items()):
        meaning = (kind.__doc__ or "").splitlines()[0]
        yield f"| `{code}` | {meaning} | {kind.http_status} | {kind.exit_code} |\n"


_DONE = {
    Blame.HARDWARE: "The hardware failed: the GPU is drained",
    Blame.CONTAINED: "The hardware failed, and the driver ended the programs that it touched",
    Blame.AVOIDED: "The hardware failed, and the driver keeps programs off the place",
    Blame.APPLICATION: "A program failed: the owners of jobs on the GPU are notified",
    Blame.ADMIN: "An admin has to look: `gpulease doctor` warns",
    Blame.UNKNOWN: "Kept and shown",
}


def xids() -> Iterator[str]:
    yield "# The XIDs\n\nDrawn from the table in `gpulease/domain/xid.py`. NVIDIA's driver reports "
    yield "errors as XIDs; [Health](admin.md#health) says what gpulease does about them.\n\n"
    yield "A GPU is drained for an XID only if NVIDIA asks for a reset, a reboot or a repair,\n"
    yield "and does not name the user's program among the causes: no user can drain a GPU with a\n"
    yield "program that fails. Where a program's fault does leave a GPU in need of a reset, the\n"
    yield "driver says so in its recovery action, and that drains the GPU.\n\nThe sources:\n\n"
    for word, source in SOURCES.items():
        yield f"* **{word}**: {source}\n"
    for blame, done in _DONE.items():
        yield f"\n## {done}\n\n| XID | what it is | source |\n|---|---|---|\n"
        for (what, source), numbers in _grouped(blame).items():
            yield f"| {', '.join(map(str, sorted(numbers)))} | {what} | {source} |\n"
    yield "\nAn XID that is in none of these tables is for an admin to look up as well.\n"


def _grouped(blame: Blame) -> dict[tuple[str, str], list[int]]:
    found: dict[tuple[str, str], list[int]] = {}
    for number, row in sorted(XIDS.items()):
        if row.blame is blame:
            found.setdefault((row.what, row.source), []).append(number)
    return found


PAGES = {"states.md": states, "errors.md": errors, "xids.md": xids}


def main(check: bool) -> int:
    stale = []
    for name, page in PAGES.items():
        text = NOTE + "".join(page())
        path = HERE / name
        if check and (not path.exists() or path.read_text(encoding="utf-8") != text):
            stale.append(name)
        elif not check:
            path.write_text(text, encoding="utf-8")
    if stale:
        sys.stderr.write(f"not as the code is now: {', '.join(stale)}\n\nhint: make docs\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
