"""The contract between a method and the engines.

A method is a composition of **parts**. A part is a frozen dataclass whose fields are its hyper-parameters and whose
methods are hooks: the points of a round that it touches. Hooks take values and return values; they keep nothing. What
they see is in :mod:`fedstrata.methods.contract.views`. The same part runs in simulation, where a hook serves K clients
at once (every tensor has a leading client axis ``[K, ...]``), and at a real site, where K = 1.

A hook that a part does not define behaves as in FedAvg.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.layers import LayerMap
from fedstrata.losses import cross_entropy
from fedstrata.methods.contract.views import Clients, Message, Phase, Probe, Server, Step, Training
from fedstrata.rng import numpy_generator
from fedstrata.spec import Spec
from fedstrata.stack import Tensors, weighted_mean

FAMILIES = (
    "averaging",
    "personal layers and models",
    "local objective",
    "aggregation",
    "layers",
    "sparse",
    "decentralised",
    "privacy",
)
"""The families of the methods that come with the package, in the order in which they are listed."""


@dataclass(frozen=True)
class Facts:
    """What is true of a part, for listings and checks; ``not_on_network`` says why it cannot run there, if so."""

    family: str
    paper: str
    link: str = ""
    not_on_network: str | None = None


@dataclass(frozen=True)
class Part(Spec):
    """One component of a method; the hooks below are FedAvg."""

    facts: ClassVar[Facts]
    claims: ClassVar[tuple[str, ...]] = ()
    """What only one part of a method can do, beside the exclusive hooks, as it is said of the part."""
    shares: ClassVar[bool] = True
    """Whether anything leaves the clients; if not, nothing can work on what they share."""
    only_on_shared: ClassVar[bool] = False
    """Whether all that it does concerns what clients share, so that without that it would silently do nothing."""
    averages: ClassVar[bool] = True
    """Whether clients go on with an average of all; if not, nothing can work on that average."""
    lets_join: ClassVar[bool] = True
    """Whether clients can join later; not where the models of all clients count from the first round on."""
    needs_exact_uploads: ClassVar[bool] = False
    """Whether what it promises would not hold if uploads were rounded on their way."""
    one_support: ClassVar[bool] = True
    """Whether all participants of a round send the same entries, under masks that the server knows."""
    separable: ClassVar[bool] = True
    """Whether the weight of a participant (:meth:`weigh`) does not depend on who else takes part."""

    def parts(self) -> tuple[Part, ...]:
        """The parts that this name stands for: itself, or several for a named composition."""
        return (self,)

    def objects_to(self, other: Part) -> str | None:
        """Tell why another part cannot stand beside this one, if it cannot, where no claim says so."""
        return None

    second_models: ClassVar[tuple[str, ...]] = ()
    """Names of whole models that each client keeps beside the shared one, in its memory under ``model/tensor``; they
    start at the common initial model, and a :class:`Phase` trains them."""

    deploys_alike: ClassVar[bool] = False
    """Whether :meth:`deployed` gives every client the same model."""

    def notes(self, layers: LayerMap) -> Iterable[str]:
        """Say where the method degenerates on a model, in sentences."""
        return ()

    def personal(self, layers: LayerMap) -> Iterable[str]:
        """Name the parameters and buffers that never leave a client."""
        return ()

    def resident(self, layers: LayerMap) -> Iterable[str]:
        """Name further ones that a client keeps between rounds, because they do not travel in every round."""
        return ()

    def initial(self, layers: LayerMap, model: Tensors, seed: int) -> Tensors:
        """Replace the common initial model, where a method trains something else than weights."""
        return model

    def proxy_samples(self) -> int:
        """Tell how many labelled samples the server needs for itself; they are taken out of the test set."""
        return 0

    def held_out(self) -> float:
        """Tell which fraction of its training samples each client holds out, to judge models on."""
        return 0.0

    def samples_per_epoch(self) -> int | None:
        """Fix the samples of a local epoch: large clients take a part of theirs, small ones repeat (exclusive)."""
        return None

    def masks_known(self, view: Clients | Server, upload: bool) -> Tensors:
        """Tell which masks both sides of a link hold before a message travels down or up it, by the tensors' names.

        A message under such a mask names it instead of sending it. Clients answer for themselves, ``[K, ...]``, the
        server for the participants, with a leading axis of K or 1; the answers must agree.
        """
        return {}

    # Client hooks -----------------------------------------------------------------------------------------------------

    def client_memory(self, clients: Clients, model: Tensors) -> Tensors:
        """Prepare what each client remembers, as stacks; ``model`` is the common initial model as a stack."""
        return {}

    def receive(self, clients: Clients, message: Message, model: Tensors, probe: Probe) -> tuple[Tensors, Tensors]:
        """Put the client's model together from a message that holds more than the model (exclusive).

        ``model`` has what the message and the client's own tensors give under their names. Return the model that the
        client goes on with, and the client's new memory.
        """
        return model, clients.memory

    def begin(self, clients: Clients, received: Tensors, message: Message) -> Tensors:
        """Look at what was received, at the start of a round, and return the client's new memory."""
        return clients.memory

    def perturb(self, clients: Clients, start: Tensors) -> Tensors:
        """Change the weights with which local training starts."""
        return start

    def phases(self, clients: Clients) -> tuple[Phase, ...]:
        """Divide local training into phases (exclusive)."""
        return (Phase(),)

    def between_phases(self, clients: Clients, number: int, model: Tensors, probe: Probe) -> tuple[Tensors, Tensors]:
        """Change the model and the client's memory after phase ``number`` (from 0), before the next one begins."""
        return model, clients.memory

    def learns(self, layers: LayerMap) -> Iterable[str]:
        """Name what is trained beside the model, among the part's own client memory."""
        return ()

    def effective(self, clients: Clients, parameters: Tensors, step: int) -> Tensors:
        """Compute the weights with which the model runs from the parameters that are trained, open to autograd."""
        return parameters

    def operations(self) -> dict[Callable[..., Tensor], Callable[..., Tensor]]:
        """Compute some torch functions of the model, such as ``conv2d``, in another way during local training.

        What stands in the place of a function is called with the function itself, and then its arguments, for one
        client.
        """
        return {}

    def wants_features(self) -> bool:
        """Tell whether hooks need the input of the model's head (``step.features``)."""
        return False

    def base_loss(self, clients: Clients, step: Step) -> Tensor:
        """Compute each client's loss ``[K]`` itself (exclusive): the mean cross entropy."""
        return cross_entropy(step.outputs, step.labels).mean(1)

    def loss(self, clients: Clients, step: Step) -> Tensor | None:
        """Add a term ``[K]`` to each client's loss."""
        return None

    def gradients(self, clients: Clients, step: Step, gradients: Tensors) -> Tensors:
        """Change the gradients before the optimiser sees them."""
        return gradients

    def project(self, clients: Clients, step: Step, parameters: Tensors) -> Tensors:
        """Change the parameters after the optimiser's step."""
        return parameters

    def wants_gradients(self) -> bool:
        """Tell whether :meth:`remember` needs the gradients of the last local step."""
        return False

    def wants_mean_gradients(self) -> bool:
        """Tell whether hooks need the mean of the gradients over all local steps, before any hook changed them."""
        return False

    def settle(self, clients: Clients, start: Tensors, trained: Tensors) -> Tensors:
        """Change the trained model, before it is remembered, kept and sent."""
        return trained

    def remember(self, clients: Clients, training: Training) -> Tensors:
        """Return the client's new memory after local training."""
        return clients.memory

    def upload(self, clients: Clients, training: Training, message: Message) -> Message:
        """Change what leaves the client; the message already holds the shared tensors."""
        return message

    def adaptation(self) -> Phase | None:
        """After the last round, let every client train once more for itself (exclusive)."""
        return None

    def deployed(self, clients: Clients, model: Tensors) -> Tensors:
        """Turn what training works on into the model that a client uses, and that is tested."""
        return model

    # Server hooks -----------------------------------------------------------------------------------------------------

    def server_memory(self, server: Server) -> Tensors:
        """Prepare what the server remembers."""
        return {}

    def select(self, server: Server, count: int) -> tuple[int, ...]:
        """Choose this many participants of a round (exclusive): uniformly, the same for every method under one seed."""
        if count == server.clients:
            return tuple(range(count))
        chosen = numpy_generator(server.seed, server.round, "select").choice(server.clients, size=count, replace=False)
        return tuple(sorted(int(client) for client in chosen))

    def broadcast(self, server: Server, message: Message) -> Message:
        """Change what the server sends; the message already holds the shared tensors of its model."""
        return message

    def weigh(self, server: Server) -> Tensor:
        r"""Give each participant its weight ``[K]`` in the merged model (exclusive): by its samples, :math:`u_k = n_k`.

        The shares of the participants are :math:`p_k = u_k / \sum_j u_j`.
        """
        return server.sizes.to(torch.float64)

    def merge(self, server: Server, replies: Message, shares: Tensor) -> Tensors:
        r"""Merge the replies (exclusive): :math:`\hat w = \sum_k p_k w_k` over the clients that sent an entry."""
        return {
            name: weighted_mean(tensor, shares, replies.masks.get(name), server.model[name])
            for name, tensor in replies.tensors.items()
            if name in server.model
        }

    def adjust(self, server: Server, merged: Tensors) -> Tensors:
        """Change the merged model before the server's step."""
        return merged

    def step(self, server: Server, merged: Tensors) -> tuple[Tensors, Tensors]:
        """Turn the merged model into the new one, and return it with the server's new memory (exclusive)."""
        return merged, server.memory

    def examine(self, server: Server, replies: Message, shares: Tensor, new: Tensors) -> tuple[Tensors, Tensors]:
        """Look at the replies of single clients, and change the new global model by them, for instance shrink layers on
        which clients disagree; return it and the server's new memory.

        A method that defines this hook or :meth:`merge` needs all replies of a round together; the others have them
        added up as they come.
        """
        return new, server.memory

    def refine(self, server: Server, new: Tensors) -> tuple[Tensors, Tensors]:
        """Change the new global model last, whoever sent what; return it and the server's new memory."""
        return new, server.memory

    def round_metrics(self, server: Server) -> dict[str, float]:
        """Tell numbers of the round worth keeping."""
        return {}

    def layer_metrics(self, server: Server) -> dict[str, dict[str, float]]:
        """Tell numbers of layers worth keeping: from the name of a metric to layers to values."""
        return {}

    # An exchange of its own, before a round: the server asks, clients answer, the server announces --------------------

    def exchanges_before(self, round: int, rounds: int) -> int:
        """Tell how many exchanges with clients come before a round, such as a saliency round."""
        return 0

    def exchanges_on_joining(self) -> int:
        """Tell how many exchanges come before a round in which new clients join."""
        return 0

    def asks(self, server: Server) -> Sequence[int]:
        """Choose the clients that are asked; all hear the announcement."""
        return range(server.clients)

    def survey(self, clients: Clients, model: Tensors, probe: Probe) -> Message:
        """Answer the server's question, at a client that has just received the current model."""
        return Message()

    def conclude(self, server: Server, replies: Message) -> tuple[Tensors, Tensors]:
        """Draw the server's conclusion: the model and the server's memory from now on."""
        return server.model, server.memory

    def announce(self, server: Server) -> Message:
        """Tell all clients what was concluded, complete: who missed an exchange hears only the last announcement."""
        return Message()

    def adopt(self, clients: Clients, announcement: Message) -> Tensors:
        """Return the client's memory after the announcement."""
        return clients.memory
