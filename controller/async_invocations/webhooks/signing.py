"""What a webhook says, how it is signed, and where it may go. Pure.

The headers and the signature are those of the Standard Webhooks specification: HMAC-SHA256 over `id.timestamp.body`.
A URL comes from a caller, so it could name what only we can reach: whatever it resolves to must be a public address,
or one that the operator has allowed (FS_WEBHOOK_ALLOW), and the connection goes to the very address that was checked.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Sequence
from urllib.parse import urlsplit

from fleetstart.runtime.contract.errors import InvalidInput, Refused
from fleetstart.runtime.contract.function.public_addresses import Address, Network, embedded, is_public, literal

URL_MAX = 2048
PREFIX = "whsec_"
SECRET_BYTES = 32
_HINT = "an operator can allow networks of their own: FS_WEBHOOK_ALLOW=10.0.0.0/8"


class WebhookRefused(Refused):
    """It would go where callers may not reach."""

    code = "webhook_refused"
    status = 400


def new_secret() -> str:
    return PREFIX + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


def signature(secret: str, message_id: str, unix_s: int, body: bytes) -> str:
    """The value of `webhook-signature`. Errors: ValueError for a secret that is none."""
    try:
        key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except binascii.Error as error:
        raise ValueError("a webhook's secret is whsec_ and base64") from error
    digest = hmac.new(key, f"{message_id}.{unix_s}.".encode() + body, hashlib.sha256).digest()
    return "v1," + base64.b64encode(digest).decode()


def headers(secret: str, message_id: str, unix_s: int, body: bytes) -> dict[str, str]:
    return {
        "content-type": "application/json",
        "user-agent": "fleetstart-webhooks/1",
        "webhook-id": message_id,
        "webhook-timestamp": str(unix_s),
        "webhook-signature": signature(secret, message_id, unix_s, body),
    }


def check_url(url: str, allowed: Sequence[Network]) -> str:
    """As far as can be told without a look-up. Errors: InvalidInput, WebhookRefused."""
    if len(url) > URL_MAX or not url.isascii() or not url.isprintable() or " " in url:
        raise InvalidInput(f"Fs-Webhook is no URL of up to {URL_MAX} printable characters")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidInput(f"Fs-Webhook cannot be read as a URL: {error}") from error
    if parts.scheme not in ("http", "https") or not host or port == 0:
        raise InvalidInput("Fs-Webhook must be an http:// or https:// URL with a host")
    if parts.username is not None or parts.password is not None:
        raise InvalidInput("Fs-Webhook has a user or a password in it", hint="the signature tells who calls")
    address = literal(host)
    if address is not None:
        check_address(host, address, allowed)
    return url


def check_address(host: str, address: Address, allowed: Sequence[Network]) -> None:
    """Errors: WebhookRefused."""
    if any(address in network for network in allowed):
        return
    if any(embedded(address) in network for network in allowed):
        return
    if not is_public(address):
        raise WebhookRefused(f"Fs-Webhook: {host} is {address}, which is no public address", hint=_HINT)
