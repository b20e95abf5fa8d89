"""Kill the daemon, the shims, and each of them at every step; then count what was promised."""
