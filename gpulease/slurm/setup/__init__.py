"""`gpulease-setup slurm`: the lines of Slurm's files, the hook, and checks of both."""
