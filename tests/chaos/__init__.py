"""Run jobs among strangers, failing calls and lost GPUs; then judge every grant from outside.

What the judge knows is not gpulease's: what was on the GPUs, and when, is written down by those who
put it there; when the daemon was told of memory in use, by the driver's stand-in. From gpulease are
the grants on record, and the answers to `GET /status`.
"""
