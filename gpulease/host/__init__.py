"""The daemon's half of the operating system: launching, cgroups, and finding processes."""
