"""The client of the daemon's API. Other packages import from here.

Each name is loaded when it is first used: a command that runs often takes only the light ones,
which are all but `Client`, `checked`, `decode`, `encode` and what finds the daemon.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpulease.client.client import Client as Client
    from gpulease.client.client import checked as checked
    from gpulease.client.codec import decode as decode
    from gpulease.client.codec import encode as encode
    from gpulease.client.discovery import find as find
    from gpulease.client.discovery import has_daemon as has_daemon
    from gpulease.client.discovery import machine_daemon as machine_daemon
    from gpulease.client.discovery import no_daemon_on as no_daemon_on
    from gpulease.client.transport import Transport as Transport
    from gpulease.client.unix_socket import Link as Link
    from gpulease.client.unix_socket import answers as answers
    from gpulease.client.unix_socket import dial as dial
    from gpulease.client.unix_socket import peer_uid as peer_uid
    from gpulease.client.unix_socket import trusted_users as trusted_users

_HOMES = {
    "client": ("Client", "checked"),
    "codec": ("decode", "encode"),
    "discovery": ("find", "has_daemon", "machine_daemon", "no_daemon_on"),
    "transport": ("Transport",),
    "unix_socket": ("Link", "answers", "dial", "peer_uid", "trusted_users"),
}

if not TYPE_CHECKING:  # for type checkers, every name would exist

    def __getattr__(name: str) -> "Any":
        """Load a name when it is first used."""
        for module, names in _HOMES.items():
            if name in names:
                from importlib import import_module

                found = getattr(import_module(f"gpulease.client.{module}"), name)
                globals()[name] = found
                return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
