"""Leases for the process that runs: the Python API; its face, through which others import it."""

from gpulease.lease_api.api import Lease, LeasedGpu, lease

__all__ = ["Lease", "LeasedGpu", "lease"]
