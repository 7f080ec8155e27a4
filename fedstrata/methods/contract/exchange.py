"""A round trip with clients before a round: the server asks, clients answer, the server concludes and announces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from fedstrata.methods.contract.views import Clients, Message, ModelAndMemory, Server
from fedstrata.stack import Tensors


class Exchange(ABC):
    """What a part wants to know of clients before some rounds; the memory that it sees is that of its part.

    The clients that are asked have just received the current model. Its bytes count.
    """

    @abstractmethod
    def due(self, round: int, rounds: int, joining: bool) -> int:
        """Tell how often it takes place before a round; ``joining`` says that new clients come in that round."""

    def asks(self, server: Server) -> Sequence[int]:
        """Choose the clients that are asked; all hear the announcement."""
        return range(server.clients)

    @abstractmethod
    def survey(self, clients: Clients, model: Tensors) -> Message:
        """Answer the server's question, at a client."""

    @abstractmethod
    def conclude(self, server: Server, replies: Message) -> ModelAndMemory:
        """Draw the server's conclusion: what changes in its model, and its memory from now on."""

    @abstractmethod
    def announce(self, server: Server) -> Message:
        """Tell all clients what was concluded, complete: who missed an exchange hears only the last announcement."""

    @abstractmethod
    def adopt(self, clients: Clients, announcement: Message) -> Tensors:
        """Return the client's memory after the announcement."""
