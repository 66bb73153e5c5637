"""TLS: whether a private key and a certificate can be used, said before anything is loaded."""

from __future__ import annotations

import ssl
from pathlib import Path

from forerun.errors import InvalidRequest


def require_certificate(key: Path, certificate: Path) -> None:
    """Raise InvalidRequest, naming the option and the file, unless HTTPS can be served with these two PEM files."""
    for option, path in (("tls_key", key), ("tls_cert", certificate)):
        try:
            with path.open("rb"):
                pass
        except OSError as error:
            raise InvalidRequest(option, f"{path} cannot be read ({error.strerror}): name a PEM file.") from error

    def no_password() -> str:
        raise InvalidRequest("tls_key", f"{key} is encrypted, and nobody is asked for its password: decrypt it.")

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            problem = f"{key} is not the key of {certificate}: name the two that belong together."
            raise InvalidRequest("tls_key", problem) from error
        problem = f"{certificate} and {key} are no certificate and key in PEM ({error.reason or error})."
        raise InvalidRequest("tls_cert", problem) from error
