"""The daemon: builds and connects its parts, handles signals, and notifies systemd."""
