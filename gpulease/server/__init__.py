"""The HTTP API over a Unix socket: who calls, what they may, and the shapes they get."""
