"""Instants as the wire has them: ISO 8601, UTC, milliseconds."""

from datetime import UTC, datetime


def instant(at: datetime | None) -> str | None:
    """Return an instant as text; None stays None."""
    if at is None:
        return None
    return at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
