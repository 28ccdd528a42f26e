"""Between nodes and SuperLink: ends TLS as the server would and begins it again, so that what crosses can be read."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading


class Wire:
    """Listens on loopback with the federation's own certificate; `heard` is what crossed, by connection and way."""

    def __init__(self, folder, port):
        self.to = ("127.0.0.1", port)
        self.server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.server.load_cert_chain(folder / "server.pem", folder / "server.key")
        self.client = ssl.create_default_context(cafile=str(folder / "ca.pem"))
        self.heard: list[bytearray] = []
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        # Without the shutdown a thread in accept() holds the port open.
        with contextlib.suppress(OSError):
            self.listening.shutdown(socket.SHUT_RDWR)
        self.listening.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                plain, _ = self.listening.accept()
                threading.Thread(target=self._carry, args=(plain,), daemon=True).start()

    def _carry(self, plain):
        with (
            contextlib.suppress(OSError),
            plain,
            self.server.wrap_socket(plain, server_side=True) as near,
            socket.create_connection(self.to) as other,
            self.client.wrap_socket(other, server_hostname="localhost") as far,
        ):
            near.settimeout(0.05)
            far.settimeout(0.05)
            ways = ((near, far, bytearray()), (far, near, bytearray()))
            self.heard += [kept for _, _, kept in ways]
            while all(self._pass(*way) for way in ways):
                pass

    @staticmethod
    def _pass(one, other, kept):
        """Hand on what has come; False when the other side is gone. One thread for both ways: TLS sockets need it."""
        try:
            part = one.recv(1 << 16)
        except TimeoutError:
            return True
        if part:
            kept += part
            other.settimeout(None)
            other.sendall(part)
            other.settimeout(0.05)
        return bool(part)
