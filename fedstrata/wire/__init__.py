"""What travels between clients and the server, as bytes."""

from fedstrata.wire.codec import WireError, decode, encode, encoded_sizes

__all__ = ["WireError", "decode", "encode", "encoded_sizes"]
