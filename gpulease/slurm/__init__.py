"""What the command and the daemon both know of Slurm: its commands, their output, its units;
and what the command shows of a cluster.

Slurm chooses the machine and the GPU of a job; gpulease holds the job to its memory there.
docs/cluster.md describes the whole. Standard library only: the command imports this.
"""
