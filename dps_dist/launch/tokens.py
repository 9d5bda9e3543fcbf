"""The token of a Ray cluster: where it is found, and whether the cluster takes it."""

import os
from pathlib import Path

import grpc

from dps_dist.errors import InputError

REMEDY = "give the cluster's in RAY_AUTH_TOKEN, or the path of its file in RAY_AUTH_TOKEN_PATH"
ANY_CALL = "/ray.rpc.NodeInfoGcsService/GetClusterId"
NO_PROXY = (("grpc.enable_http_proxy", 0),)  # it would see the token
TLS_FILES = ("RAY_TLS_CA_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_SERVER_CERT")
ANSWER_S = 5.0


def find(file: Path | None = None) -> str | None:
    """From this file, or from where Ray looks for it; none where there is none."""
    if file is None and os.environ.get("RAY_AUTH_TOKEN"):
        return os.environ["RAY_AUTH_TOKEN"]
    named = file or os.environ.get("RAY_AUTH_TOKEN_PATH")
    if named and not Path(named).is_file():
        option = "--token-file" if file else "RAY_AUTH_TOKEN_PATH"
        raise InputError(f"{option} is {named}: there is no such file")
    held = Path(named) if named else Path.home() / ".ray" / "auth_token"
    try:
        return held.read_text(encoding="utf-8").strip() if held.is_file() else None
    except UnicodeDecodeError:
        raise InputError(f"{held} holds no token, it is no text: {REMEDY}") from None


def check(address: str) -> None:
    """Refuse a wrong token, or none, where one is wanted: Ray itself tries for half a minute."""
    token = find()
    sent = (("authorization", f"Bearer {token}"),) if token else ()
    with _channel(address) as channel:
        try:
            channel.unary_unary(ANY_CALL)(b"", timeout=ANSWER_S, metadata=sent)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                why = "the token is wrong" if token else "it wants a token"
                raise InputError(
                    f"the Ray cluster at {address} refuses, {why}: {REMEDY}, or train on this "
                    "machine with RAY_ADDRESS=local"
                ) from None


def _channel(address: str) -> grpc.Channel:
    """As Ray opens it: encrypted, with a certificate of our own, where the environment says so."""
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return grpc.insecure_channel(address, NO_PROXY)
    credentials = grpc.ssl_channel_credentials(*(_tls_file(name) for name in TLS_FILES))
    return grpc.secure_channel(address, credentials, NO_PROXY)


def _tls_file(name: str) -> bytes:
    path = os.environ.get(name, "")
    if not Path(path).is_file():
        raise InputError(
            f"{name} is {path or 'not set'}: there is no such file; with RAY_USE_TLS give those "
            "that deploy/ray/certificate.sh makes"
        )
    return Path(path).read_bytes()
