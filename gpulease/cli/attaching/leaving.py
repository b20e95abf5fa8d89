"""The ways in which an attachment ends before its job does."""

import signal


class Left(Exception):
    """The job goes on and nobody is attached: our terminal has gone, or we were told to go."""

    def __init__(self, signum: signal.Signals) -> None:
        super().__init__(signum.name)
        self.signum = signum


class Detached(Exception):
    """The job goes on and nobody is attached: that is what was typed."""


class TurnedAway(Exception):
    """The shim lets this caller not attach; the text is its reason."""
