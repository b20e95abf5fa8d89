"""The command on a cluster: each verb asks Slurm's own commands, and no daemon.

The modules are imported only where a verb acts on Slurm (`cluster_choice.acts_on_slurm`).
"""
