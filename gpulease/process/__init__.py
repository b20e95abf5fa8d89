"""Processes: launching a job's worker, keeping it company, and knowing whose process is whose.

The daemon's side is `launcher`, `control`, `table` and `record`. The rest runs in the spawner and
in the shims, which import the standard library, `gpulease.frames` and `gpulease.backlog` alone.
"""
