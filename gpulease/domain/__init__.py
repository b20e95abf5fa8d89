"""The rules of leasing GPU memory: pure functions over frozen values; no clock, no I/O."""
