"""The daemon on a node of a cluster: leases for the jobs that Slurm starts there.

`node` puts it together, `routes` answers Slurm's prolog, epilog and task prolog, `leases` grants.
"""
