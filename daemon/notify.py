"""What systemd wants to hear: READY, STOPPING, WATCHDOG; nothing where it does not listen.

Source: sd_notify(3), systemd.service(5)
"""

from __future__ import annotations

import os
import socket

__all__ = ["Notifier"]


_DELIVERY_SECONDS = 1.0
"""For what is said once; a service manager that does not read must not hold up the daemon's loop."""


class Notifier:
    """Sends datagrams to $NOTIFY_SOCKET; without one every call does nothing."""

    def __init__(self, address: str | None, watchdog_usec: str | None = None) -> None:
        """Args: address: as in the environment, a leading @ means an abstract socket; None: not under systemd."""
        self._address = "\0" + address[1:] if address and address.startswith("@") else address
        self._watchdog_usec = watchdog_usec

    @classmethod
    def from_environment(cls) -> Notifier:
        """What systemd has set for this process."""
        usec = (
            os.environ.get("WATCHDOG_USEC")
            if os.environ.get("WATCHDOG_PID") in {None, str(os.getpid())}
            else None
        )
        return cls(os.environ.get("NOTIFY_SOCKET"), usec)

    @property
    def watchdog_seconds(self) -> float | None:
        """How often WATCHDOG must be said at least; None: it is not wanted."""
        return (
            int(self._watchdog_usec) / 1e6 if self._watchdog_usec and self._watchdog_usec.isdigit() else None
        )

    def ready(self, status: str) -> None:
        """We serve."""
        self._send(f"READY=1\nSTATUS={status}", _DELIVERY_SECONDS)

    def stopping(self) -> None:
        """We have begun to stop."""
        self._send("STOPPING=1", _DELIVERY_SECONDS)

    def watchdog(self, status: str) -> None:
        """We are alive; said again soon, so that it may be lost."""
        self._send(f"WATCHDOG=1\nSTATUS={status}", 0.0)

    def _send(self, text: str, seconds_max: float) -> None:
        if self._address is None:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as connection:
            connection.settimeout(seconds_max)
            try:
                connection.sendto(text.encode(), self._address)
            except OSError:
                return  # systemd restarts; it asks again by its watchdog
