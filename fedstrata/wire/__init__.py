"""What travels between clients and the server, as bytes."""

from fedstrata.wire.codec import (
    bytes_sent,
    bytes_to_count,
    decode,
    encode,
    encoded_sizes,
    outline,
    quantisation_error,
    received,
)
from fedstrata.wire.encodings import ENCODINGS, bytes_by_encoding
from fedstrata.wire.frame import WireError
from fedstrata.wire.masks import mask_hash
from fedstrata.wire.values import AS_IS, VALUES

__all__ = [
    "AS_IS",
    "ENCODINGS",
    "VALUES",
    "WireError",
    "bytes_by_encoding",
    "bytes_sent",
    "bytes_to_count",
    "decode",
    "encode",
    "encoded_sizes",
    "mask_hash",
    "outline",
    "quantisation_error",
    "received",
]
