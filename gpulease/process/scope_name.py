"""What the scopes of jobs are called; known to who makes them and to who finds them."""

SLICE = "gpulease.slice"


def scope_name(job: int) -> str:
    """Return the name of the unit, and of its cgroup."""
    return f"gpulease-job-{job}.scope"
