"""A method on real machines: sites that keep their data and their state, and a server that merges what they send.

    protocol.py     what a server asks a site, what the site answers, and the places of a run at which it does
    site.py         a site: it answers requests, each once
    store.py        what a site keeps on its disk
    server.py       a run from its beginning, or from its last round, to its end
    engine.py       rounds over a federation, for :class:`fedstrata.runs.driver.Driver`
    federation.py   the sites as the server sees them: asking, waiting, refusing
    rules.py        how long a server waits, for how many, and what it refuses
    checks.py       replies as hostile input
    secure/         secure aggregation: the server sees only the sum of the uploads
    flower/         all that knows Flower, which carries the messages
    keys.py         certificates, keys, and the file that names the sites
    local.py        a rehearsal on one machine, with a process for each site
    link.py         slow connections for it

How messages travel, only ``flower/`` and ``local.py`` know.
"""
