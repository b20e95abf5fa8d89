"""Replays traces of jobs through the daemon's own `plan`, on a virtual clock."""
