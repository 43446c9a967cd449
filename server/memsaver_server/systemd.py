"""Tells systemd how far the service is, if it is a unit of ``Type=notify``."""

from __future__ import annotations

import os
import socket
from contextlib import suppress


def notify(state: str) -> None:
    """Send ``state``, for example ``READY=1``, to the socket that NOTIFY_SOCKET names; without one do nothing.

    The protocol is that of sd_notify(3). What cannot be sent is dropped: serving does not depend on it.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address.startswith(("/", "@")):
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto(state.encode(), f"\0{address[1:]}" if address[0] == "@" else address)
