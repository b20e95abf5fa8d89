"""Benchmarks of the project's performance claims; each figure has a reference from the same run."""
