"""The steps of a launch: each failure names its step and says in a sentence what went wrong."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from gpulease.process.record import Failure


class StepFailed(Exception):
    """A step of the launch failed."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@contextmanager
def step(name: str, sentence: str, hint: str | None = None) -> Iterator[None]:
    """Turn an OSError within into StepFailed: the sentence, a colon, and what the system says."""
    try:
        yield
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        raise StepFailed(Failure(name, error.errno, f"{sentence}: {why}", hint)) from error


def shown(text: str | bytes, length: int = 400) -> str:
    """Return `text` fit for a sentence: bytes that are no UTF-8 escaped, and not too long."""
    known = os.fsencode(text).decode("utf-8", "backslashreplace")
    return known if len(known) <= length else f"{known[:length]}..."
