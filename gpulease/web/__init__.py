"""The web page and the metrics, by a process that asks the daemon as any user may."""
