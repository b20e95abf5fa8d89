"""The Python API: leases for the calling process. Other packages import from here."""

from gpulease.lease_api.api import Lease, LeasedGpu, lease

__all__ = ["Lease", "LeasedGpu", "lease"]
