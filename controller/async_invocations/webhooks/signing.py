"""Webhook signatures and the policy of allowed targets. Pure.

Headers and signature follow the Standard Webhooks specification: HMAC-SHA256 over `id.timestamp.body`. A URL comes from
a caller, so it could name a host that only the controller can reach (SSRF): it must resolve to a public address, or to
one that the operator allows (FS_WEBHOOK_ALLOW), and the connection goes to the address that was checked.
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
    """The webhook's target is not allowed."""

    code = "webhook_refused"
    status = 400


def new_secret() -> str:
    return PREFIX + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


def signature(secret: str, message_id: str, unix_s: int, body: bytes) -> str:
    """Computes the value of `webhook-signature`. Errors: ValueError for a malformed secret."""
    try:
        key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except binascii.Error as error:
        raise ValueError("a webhook's secret is whsec_ and base64") from error
    digest = hmac.new(key, f"{message_id}.{unix_s}.".encode() + body, hashlib.sha256).digest()
    return "v1," + base64.b64encode(digest).decode()


def headers(secrets_now: Sequence[str], message_id: str, unix_s: int, body: bytes) -> dict[str, str]:
    """Headers of a delivery, with a signature by each secret: a receiver takes it if one of them is good."""
    return {
        "content-type": "application/json",
        "user-agent": "fleetstart-webhooks/1",
        "webhook-id": message_id,
        "webhook-timestamp": str(unix_s),
        "webhook-signature": " ".join(signature(secret, message_id, unix_s, body) for secret in secrets_now),
    }


def check_url(url: str, allowed: Sequence[Network]) -> str:
    """Checks a URL as far as possible without resolving its host. Errors: InvalidInput, WebhookRefused."""
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
        raise InvalidInput("Fs-Webhook has a user or a password in it", hint="verify the signature instead")
    address = literal(host)
    if address is not None:
        check_address(host, address, allowed)
    return url


def check_address(host: str, address: Address, allowed: Sequence[Network]) -> None:
    """Checks a resolved address. Errors: WebhookRefused."""
    if any(address in network for network in allowed):
        return
    if any(embedded(address) in network for network in allowed):
        return
    if not is_public(address):
        named = host if host.strip("[]") == str(address) else f"{host} is {address}, which"
        raise WebhookRefused(f"Fs-Webhook: {named} is not a public address", hint=_HINT)
