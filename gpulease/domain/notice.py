"""A notice: one line that gpulease has to say to the owner of a job."""

LONGEST = 500
"""Characters."""


def one_line(text: str) -> str:
    """Return `text` as a line that is harmless on any terminal: no control characters, not long."""
    spaced = " ".join(text.split())
    clean = "".join(char if char.isprintable() else "?" for char in spaced)
    return clean if len(clean) <= LONGEST else clean[: LONGEST - 3] + "..."
