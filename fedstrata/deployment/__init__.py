"""A method on real machines: sites that keep their data and their state, and a server that merges what they send.

What both ends agree on:

    protocol.py       what a server asks a site, what the site answers, and at which places of a run
    facts.py          numbers and scores in what travels beside the payload
    declarations.py   what sites declare about their samples
    last_steps.py     from which step of a site it goes on, so that no state is lost or replaced in silence
    statistics.py     what they tell for the mean and deviation of all samples

A site:

    site.py           it answers requests, each once
    site_data.py      where its samples come from
    own_parameters.py what of an experiment only the site itself may set: paths, and leave to fetch
    member.py         its part in one run
    store.py          what it keeps on its disk
    saving.py         the model that it ends with
    telling.py        what it tells its operator

The server:

    server.py         a run from its beginning, or from its last round, to its end
    engine.py         its rounds, as an engine for :class:`fedstrata.runs.driver.Driver`
    pooling.py        the mean and deviation of all sites' samples
    federation.py     the sites as the server sees them: asking, waiting, refusing
    rules.py          how long it waits, for how many, and what it refuses
    checks.py         replies as hostile input
    describing.py     what leaves a site and by which rules, in sentences

Beside them:

    secure/           secure aggregation: the server sees only the sum of the uploads
    flower/           all that knows Flower, which carries the messages
    keys.py           certificates, keys, and the file that names the sites
    local.py          a rehearsal: a server and its sites on one machine
    link.py           slow connections for a rehearsal
"""
