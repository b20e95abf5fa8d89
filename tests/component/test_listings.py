"""Listings: what is left of one in the memory of the daemon."""

import psutil

from gpulease.server.listings import return_memory
from gpulease.units import KIB, MIB


def test_the_pieces_of_a_large_reply_return_to_the_system() -> None:
    # Larger than what Python keeps memory for itself, and each beside something that stays.
    pairs = [(bytes(16 * KIB), bytes(KIB)) for _ in range(1024)]
    staying = [stays for _, stays in pairs]
    del pairs
    kept = psutil.Process().memory_full_info().uss

    return_memory(bytes(2 * MIB))

    assert kept - psutil.Process().memory_full_info().uss > 8 * MIB
    assert len(staying) == 1024
