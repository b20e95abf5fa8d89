"""The JSON shapes and the frames that the daemon and its clients exchange."""
