"""What the screens of `gpulease top` share: messages, the keys at the bottom, questions."""

from textwrap import wrap
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.events import Key, Resize
from textual.screen import ModalScreen, Screen
from textual.widgets import Input, Static

from gpulease.cli.top.lines import Line, Lines, Terminal, ascii_only, fitted
from gpulease.drawing.words import clean
from gpulease.errors import GpuleaseError

_HELP = "? help"
_KEYS_HELP = """\
KEYS
arrows, PgUp, PgDn  select a row
Tab, left, right    jobs or queue
Enter               open a job
p                   its processes
Esc                 back; show all rows
1 to 9              sort as usual, by job,
                    user, name, gpu,
                    memory, util, ran,
                    time; again: reverse
s, S, r             next column, previous
                    one; reverse
/                   show only a text,
                    user=NAME, gpu=N
u, g, m             by user, by GPU, yours
c, e, k, a          cancel, extend, keep,
                    attach; they ask first
Space               look at once
?, Esc              close this page
q                   quit
"""
_MARKS_HELP = """\
MEMORY OF A GPU
name, # or full   used in leases
                  of that user
= or a shade      leased, not used
! or checkered    without a lease
. or light shade  free
/ or slanted      cannot be leased
x or dark shade   not leased; one job
                  has the GPU alone
util, memory      the last minutes,
                  10 s a character

PROCESSES OF A JOB
uses, util        memory of GPUs, and
                  their utilization
cpu               100% is one core
Enter             its environment,
                  if it is yours

--mouse: a click selects, a second
one opens, the wheel scrolls
"""
_TWO_COLUMNS = 78
"""Cells in which both parts of the help are side by side."""
_MOST_NOTES = 4
"""Lines for messages."""


class TopScreen(Screen[None]):
    """A screen with a line of keys at the bottom, and messages above it."""

    DEFAULT_CSS = "#note { height: 0; }"
    KEYS: ClassVar[str] = ""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__()
        self.note = Lines(terminal, id="note")
        self.keys = Lines(terminal, id="keys")
        self._said: list[Line] = []
        self._trouble: list[Line] = []

    def say(self, text: str, hint: str | None = None, style: str = "good") -> None:
        """Show a message until the next key."""
        self._said = self._wrapped(text, style)
        if hint:
            self._said += self._wrapped(f"hint: {hint}", "")
        self._show_notes()

    def fail(self, error: GpuleaseError) -> None:
        """Show why something cannot be done, and the hint, until the next key."""
        self.say(error.message, error.hint, "bad")

    def trouble(self, error: GpuleaseError | None) -> None:
        """Show what is wrong until it is over."""
        before, self._trouble = self._trouble, []
        if error is not None:
            self._trouble = self._wrapped(f"{error.message}; trying again", "warn")
            if error.hint:
                self._trouble += self._wrapped(f"hint: {error.hint}", "")
        if before != self._trouble:
            self._show_notes()

    def on_key(self, _event: Key) -> None:
        """Remove the last message."""
        if self._said:
            self._said = []
            self._show_notes()

    def on_resize(self, _event: Resize) -> None:
        """Draw the keys for the new width."""
        keys = keys_in(self.KEYS, self.size.width)
        self.keys.show([fitted(((keys, "keys"),), self.size.width)])

    def _show_notes(self) -> None:
        notes = [*self._trouble, *self._said]
        if len(notes) > _MOST_NOTES:
            notes[_MOST_NOTES - 1 :] = [(*notes[_MOST_NOTES - 1], (" …", ""))]
        self.note.styles.height = len(notes)
        self.note.show(notes)

    def _wrapped(self, text: str, style: str) -> list[Line]:
        width = max(20, self.size.width - 2)  # room for a mark that there is more
        return [((line, style),) for line in wrap(clean(" ".join(text.split())), width)]


def keys_in(keys: str, width: int) -> str:
    """Return the keys for which there is room, and the key for help, which lists all."""
    kept = keys.split("  ")
    while len(kept) > 1 and len("  ".join(kept)) > width:
        del kept[max(place for place, key in enumerate(kept) if key != _HELP)]
    return "  ".join(kept)


class Confirm(ModalScreen[bool]):
    """Asks whether to do something; y does it."""

    DEFAULT_CSS = "Confirm { align: left bottom; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", show=False),
        Binding("n,escape,q,ctrl+c", "answer(False)", show=False, priority=True),
    ]

    def __init__(self, question: str, terminal: Terminal) -> None:
        super().__init__()
        self._question = Question(question, "y yes   n no", terminal)

    def compose(self) -> ComposeResult:
        """Put the question at the bottom."""
        yield self._question

    def action_answer(self, answer: bool) -> None:
        """Close with the answer."""
        self.dismiss(answer)


class Ask(ModalScreen[str | None]):
    """Asks for a word or several; Enter takes them."""

    DEFAULT_CSS = """
    Ask { align: left bottom; }
    Ask Input { width: 100%; background: ansi_default; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,ctrl+c", "leave", show=False, priority=True),
    ]

    def __init__(self, question: str, text: str, terminal: Terminal) -> None:
        super().__init__()
        self._question = Question(question, "Enter confirms   Esc cancels", terminal)
        self._input = Input(text, select_on_focus=False, compact=True)
        self._input.cursor_blink = False

    def compose(self) -> ComposeResult:
        """Put the question and the input at the bottom."""
        yield self._question
        yield self._input

    def on_mount(self) -> None:
        """Let keys go to the input."""
        self._input.focus()

    def on_key(self, event: Key) -> None:
        """Take what was typed together with the key that asked, before the input has the focus."""
        if not self._input.has_focus and event.is_printable and event.character:
            self._input.value += event.character
            event.stop()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Close with the text."""
        self.dismiss(event.value)

    def action_leave(self) -> None:
        """Close without an answer."""
        self.dismiss(None)


class Question(Vertical):
    """A question, in as many lines as it needs, and the keys that answer it."""

    DEFAULT_CSS = """
    Question { height: auto; }
    Question .question { text-style: bold; }
    Question .answers { width: auto; text-style: reverse; }
    """

    def __init__(self, question: str, keys: str, terminal: Terminal) -> None:
        shown = question if terminal.utf8 else ascii_only(question)
        super().__init__(
            Static(shown, classes="question", markup=False),
            Static(keys, classes="answers", markup=False),
        )


class Help(ModalScreen[None]):
    """Shows the keys, and what the marks mean."""

    DEFAULT_CSS = """
    Help { background: ansi_default; }
    Help .wide { layout: horizontal; }
    Help .wide Static { width: auto; margin-right: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark,enter,space,ctrl+c", "leave", show=False, priority=True),
    ]

    def compose(self) -> ComposeResult:
        """Fill the screen; on a small one the arrows scroll."""
        yield VerticalScroll(Static(_KEYS_HELP, markup=False), Static(_MARKS_HELP, markup=False))

    def on_resize(self, event: Resize) -> None:
        """Put the parts side by side where there is room."""
        is_wide = event.size.width >= _TWO_COLUMNS
        self.query_one(VerticalScroll).set_class(is_wide, "wide")

    def on_mount(self) -> None:
        """Let keys go to the text."""
        self.query_one(VerticalScroll).focus()

    def action_leave(self) -> None:
        """Go back."""
        self.dismiss(None)
