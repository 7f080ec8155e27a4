"""Components with parameters: how they are declared, written as text, checked and listed.

A method, a partition, a model, an optimiser: each is a frozen dataclass derived from :class:`Spec` whose fields are its
parameters, declared with :func:`parameter`, and which stands under a name in a :class:`Registry`. On the command
line and in TOML files it is written as a call::

    fedprox(mu=0.01)     dirichlet:0.1     cnn     fedbn+lips(tau0=0.5)

``name:value`` is short for ``name(value)``, the first parameter. A value that is more than a word stands in quotes; a
quote inside it is doubled. :meth:`Registry.make` reads such a text, ``str(spec)`` writes it back in its shortest form.
"""

from fedstrata.spec.describing import describe_parameters, description, sources, summary
from fedstrata.spec.parameters import Spec, parameter
from fedstrata.spec.registry import Entry, Origin, Registrations, Registry, is_registering, registering
from fedstrata.spec.text import Call, Value, format_value, parse, read_value, split_outside

__all__ = [
    "Call",
    "Entry",
    "Origin",
    "Registrations",
    "Registry",
    "Spec",
    "Value",
    "describe_parameters",
    "description",
    "format_value",
    "is_registering",
    "parameter",
    "parse",
    "read_value",
    "registering",
    "sources",
    "split_outside",
    "summary",
]
