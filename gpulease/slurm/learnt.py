"""What commands needed before, in the summary of each node, so that any node can size the next run.

The daemon of a node publishes the sizes that it would give to jobs without --mem, and the command
on any node looks its own up. The keys are digests: everybody can read a summary.
"""

from collections.abc import Iterable, Mapping

from gpulease.fingerprint import CommandFingerprint

MOST = 100
"""Sizes that a node publishes, the newest."""
_DIGITS = 16


def learnt_key(uid: int, key: str) -> str:
    """Return the key of a user's command; `key` is one of the two of its fingerprint."""
    from hashlib import sha256  # commands with a size start faster without it

    return sha256(f"{uid}:{key}".encode()).hexdigest()[:_DIGITS]


def learnt_keys(uid: int, fingerprint: CommandFingerprint) -> tuple[str, str]:
    """Return the keys to look up, in order: that of the same command, and that of similar ones."""
    return learnt_key(uid, fingerprint.exact_key), learnt_key(uid, fingerprint.similar_key)


def learnt_size(
    summaries: Iterable[Mapping[str, int]], uid: int, fingerprint: CommandFingerprint
) -> int | None:
    """Return the bytes that a command needed before, by the sizes of all nodes; None if unknown.

    Nodes may have seen different runs: the largest size counts.
    """
    known = list(summaries)
    for key in learnt_keys(uid, fingerprint):
        if found := [each[key] for each in known if key in each]:
            return max(found)
    return None
