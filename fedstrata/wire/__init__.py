"""What travels between clients and the server, as bytes."""

from fedstrata.wire.codec import decode, encode, encoded_sizes, quantisation_error
from fedstrata.wire.frame import WireError
from fedstrata.wire.masks import mask_hash

__all__ = ["WireError", "decode", "encode", "encoded_sizes", "mask_hash", "quantisation_error"]
