"""The shim: a small parent beside each job, which runs as the user and outlives the daemon."""
