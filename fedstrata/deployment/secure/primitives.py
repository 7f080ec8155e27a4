"""What secure aggregation is made of: secrets in shares, keys on which two sites agree, masks, and sealed messages.

Shares are Shamir's (How to Share a Secret, 1979), over the field of the prime :math:`2^{521} - 1`. Two sites agree on a
key with X25519 and HKDF; a key becomes a mask with AES-256 in counter mode, and seals a message with ChaCha20-Poly1305.
Random bytes are passed in.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedstrata.deployment.protocol import ProtocolError

Vector = npt.NDArray[np.unsignedinteger[Any]]
RandomBytes = Callable[[int], bytes]
KEY_BYTES, SHARE_BYTES = 32, 66
_PRIME = 2**521 - 1
_NONCE_BYTES = 12
_TAG_BYTES = 16
SEALED_BYTES = _NONCE_BYTES + 2 * SHARE_BYTES + _TAG_BYTES
_CHUNK_BYTES = 2**18
_TRIES = 300


# Secrets in shares ----------------------------------------------------------------------------------------------------


def split_secret(secret: bytes, holders: Collection[int], needed: int, random_bytes: RandomBytes) -> dict[int, bytes]:
    """Divide a secret into shares for some holders, of which any ``needed`` restore it and fewer tell nothing.

    A share is the value at a holder's place of a random polynomial whose value at zero is the secret (Shamir, 1979).
    """
    drawn = (int.from_bytes(random_bytes(SHARE_BYTES)) % _PRIME for _ in range(needed - 1))
    coefficients = [int.from_bytes(secret), *drawn]
    shares = {}
    for holder in holders:
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * _place(holder) + coefficient) % _PRIME
        shares[holder] = value.to_bytes(SHARE_BYTES)
    return shares


def restore_secret(
    shares: Mapping[int, bytes], needed: int, is_right: Callable[[bytes], bool]
) -> tuple[bytes, list[int]]:
    """Restore a secret that can be recognised; where shares are wrong, find others that fit, and whose are wrong."""
    holders = sorted(shares)
    if len(holders) < needed:
        raise ProtocolError(f"Only {len(holders)} of {needed} needed shares of a secret are there.")
    values = {holder: int.from_bytes(shares[holder]) for holder in holders}
    for number in range(_TRIES):
        chosen = holders[:needed] if number == 0 else random.Random(number).sample(holders, needed)
        points = {holder: values[holder] for holder in chosen}
        secret = _value_at(points, 0)
        if secret < 2 ** (8 * KEY_BYTES) and is_right(secret.to_bytes(KEY_BYTES)):
            wrong = [] if number == 0 else [own for own in holders if _value_at(points, _place(own)) != values[own]]
            return secret.to_bytes(KEY_BYTES), wrong
    raise ProtocolError("The shares of a secret do not fit together.")


def _value_at(points: Mapping[int, int], place: int) -> int:
    """Find the value at a place of the polynomial through the holders' points (Lagrange)."""
    total = 0
    for holder, value in points.items():
        top, bottom = value, 1
        for other in points:
            if other != holder:
                top = top * (place - _place(other)) % _PRIME
                bottom = bottom * (_place(holder) - _place(other)) % _PRIME
        total += top * pow(bottom, -1, _PRIME)
    return total % _PRIME


def _place(holder: int) -> int:
    return holder + 1


# Keys, masks and seals ------------------------------------------------------------------------------------------------


def public_key(private: bytes) -> str:
    """Return the public half of a private key."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw().hex()


def agreed_key(private: bytes, public: str, purpose: str) -> bytes:
    """Compute the key on which the owners of two pairs agree for a purpose."""
    try:
        shared = X25519PrivateKey.from_private_bytes(private).exchange(
            X25519PublicKey.from_public_bytes(read_hex(public))
        )
    except ValueError:
        raise ProtocolError("A public key came that is none.") from None
    return HKDF(hashes.SHA256(), KEY_BYTES, None, f"fedstrata {purpose}".encode()).derive(shared)


def add_mask(vector: Vector, key: bytes, sign: int = 1) -> None:
    """Add the random numbers of a key to a vector, in place, or subtract them; sums wrap around."""
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    zeros, drawn = bytes(_CHUNK_BYTES), bytearray(_CHUNK_BYTES + 15)
    at_once = _CHUNK_BYTES // vector.itemsize
    for start in range(0, len(vector), at_once):
        part = vector[start : start + at_once]
        stream.update_into(memoryview(zeros)[: part.nbytes], drawn)
        numbers = np.frombuffer(drawn, dtype=vector.dtype.newbyteorder("<"), count=len(part))
        if sign > 0:
            part += numbers
        else:
            part -= numbers


def pair_sign(site: int, other: int) -> int:
    """Tell with which sign a site takes the mask that it shares with another, which takes it with the other sign."""
    return 1 if site < other else -1


def seal(key: bytes, shares: tuple[bytes, bytes], about: str, random_bytes: RandomBytes) -> str:
    """Seal a share of a seed and one of a key under a key, together with what they are about."""
    nonce = random_bytes(_NONCE_BYTES)
    return (nonce + ChaCha20Poly1305(key).encrypt(nonce, b"".join(shares), about.encode())).hex()


def unseal(key: bytes, sealed: str, about: str) -> tuple[bytes, bytes]:
    """Open what was sealed under a key, and about the same."""
    content = read_hex(sealed, SEALED_BYTES)
    try:
        shares = ChaCha20Poly1305(key).decrypt(content[:_NONCE_BYTES], content[_NONCE_BYTES:], about.encode())
    except InvalidTag:
        raise ProtocolError(f"Shares came that were not sealed about '{about[:100]}'.") from None
    return shares[:SHARE_BYTES], shares[SHARE_BYTES:]


def read_hex(text: Any, length: int = KEY_BYTES) -> bytes:
    """Read so many bytes from hexadecimal digits."""
    try:
        content = bytes.fromhex(text) if isinstance(text, str) and len(text) == 2 * length else b""
    except ValueError:
        content = b""
    if len(content) != length:
        raise ProtocolError(f"Something came in the place of {length} bytes.")
    return content
