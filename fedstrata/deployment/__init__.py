"""A method on real machines: sites that keep their data and their state, and a server that merges what they send.

    protocol.py     what a server asks a site, and what the site answers
    store.py        what a site keeps on its disk
    site.py         a site: it answers requests, each once
    rules.py        how long a server waits, for how many, and what it refuses
    checks.py       replies as hostile input
    federation.py   the sites as the server sees them: asking, waiting, refusing
    engine.py       rounds over a federation, for :class:`fedstrata.runs.driver.Driver`
    server.py       a run from its beginning, or from its last round, to its end

Nothing here knows how messages travel; :mod:`fedstrata.engines.flower` carries them with Flower, and
:mod:`fedstrata.deployment.superlink`, :mod:`fedstrata.deployment.supernode` are the two ends of a Flower connection.
"""
