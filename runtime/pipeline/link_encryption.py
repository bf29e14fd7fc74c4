"""TLS between stages on different machines, under the key of their pipeline.

Both ends show the same certificate: the nodes derive it, and its key, from the pipeline's secret, which the controller
gave to each of its stages and to nobody else. A worker of another function, or of another pipeline of this one, has
another key.
"""

from __future__ import annotations

import hmac
import socket
import ssl

from ..contract.identity import Identity, client_context, server_context
from .frames import LinkBroken


class LinkEncryption:
    """Both contexts of one pipeline. Thread-safe."""

    def __init__(self, identity: Identity) -> None:
        self._certificate = ssl.PEM_cert_to_DER_cert(identity.certificate)
        self._server = server_context(identity)
        self._client = client_context(identity, check_hostname=False)

    def as_server(self, link: socket.socket, within_s: float) -> ssl.SSLSocket:
        """The link over an accepted connection. Owns the connection. Errors: LinkBroken."""
        link.settimeout(within_s)
        return self._shaken(self._server, link, server_side=True)

    def as_client(self, link: socket.socket) -> ssl.SSLSocket:
        """The link over a connection; waits for as long as it is open: the other worker may still be starting. Owns the
        connection. Errors: LinkBroken."""
        link.settimeout(None)
        return self._shaken(self._client, link, server_side=False)

    def _shaken(self, context: ssl.SSLContext, link: socket.socket, *, server_side: bool) -> ssl.SSLSocket:
        try:
            # The socket stays the caller's own, so that it can be shut down while the handshake lasts.
            encrypted = context.wrap_socket(link.dup(), server_side=server_side, do_handshake_on_connect=False)
        except OSError as error:
            raise LinkBroken(str(error)) from error
        try:
            encrypted.settimeout(link.gettimeout())
            encrypted.do_handshake()
            shown = encrypted.getpeercert(binary_form=True) or b""
            if not hmac.compare_digest(shown, self._certificate):
                raise LinkBroken("another certificate than that of its pipeline")
        except OSError as error:  # with ssl.SSLError and TimeoutError
            encrypted.close()
            raise LinkBroken(f"TLS: {error}") from error
        except LinkBroken:
            encrypted.close()
            raise
        link.close()
        return encrypted
