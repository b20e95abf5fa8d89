"""What the command talks to, made of plain values that a test may change: a daemon and a shim."""
