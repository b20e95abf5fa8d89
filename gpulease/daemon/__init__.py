"""The daemon: builds the parts, wires them, tells systemd, hears signals; decides nothing."""
