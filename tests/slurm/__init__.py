"""gpulease under Slurm: a cluster of several machines, made of namespaces of this one."""
