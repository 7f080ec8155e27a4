"""What is used of Flower beside its documented interface, read from Flower 1.41.0.

Another version may move any of it. :mod:`fedstrata.deployment.flower.superlink` and
:mod:`fedstrata.deployment.flower.supernode` are made of such things altogether; no other file imports any.
"""

from flwr.common.constant import ErrorCode
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

__all__ = ["APP_RAISED", "public_key_to_bytes"]

APP_RAISED = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
"""The code of a message that says that the ClientApp failed; other codes are of messages that Flower gave up."""
