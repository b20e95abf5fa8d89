"""The `gpulease-setup` command: installs and removes the systemd units."""
