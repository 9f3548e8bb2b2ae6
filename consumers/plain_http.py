"""HTTP without TLS, to servers of this machine."""

from __future__ import annotations

import ssl

import httpx

__all__ = ["NO_AUTHORITIES", "plain_client"]

NO_AUTHORITIES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For httpx's `verify`. Trusts nobody, and costs nothing: a client without it reads this machine's certificate
authorities first, which takes 50 ms of its thread, in the middle of a takeover too. An address of https is refused with
it."""


def plain_client(timeout: httpx.Timeout | float = 5.0) -> httpx.AsyncClient:
    """A client that no proxy comes between.

    Args:
        timeout: seconds; httpx's own unless said.
    """
    return httpx.AsyncClient(trust_env=False, verify=NO_AUTHORITIES, timeout=timeout)
