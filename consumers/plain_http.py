"""HTTP without TLS, to servers of this machine: what every client of them is given as `verify`."""

from __future__ import annotations

import ssl

__all__ = ["NO_AUTHORITIES"]

NO_AUTHORITIES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Trusts nobody, and costs nothing: a client without it reads this machine's certificate authorities first, which takes
50 ms of its thread, in the middle of a takeover too. An address of https is refused with it."""
