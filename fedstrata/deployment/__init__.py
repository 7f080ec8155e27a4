"""A method on real machines: sites that keep their data and their state, and a server that merges what they send.

What both ends agree on:

    protocol.py       what a server asks a site, what the site answers, and at which places of a run
    foreign_text.py   text that others wrote, made harmless
    facts.py          numbers and scores in what travels beside the payload
    declarations.py   what sites declare about their samples
    agreement.py      what these have in common: known, or declared by more than half
    last_steps.py     from which step of a site it goes on, so that no state is lost or replaced in silence
    statistics.py     what they tell for the mean and deviation of all samples

A site:

    site.py           it answers requests, each once
    site_data.py      where its samples come from
    own_parameters.py what of an experiment only the site itself may set: paths, and leave to fetch
    member.py         its part in one run
    store.py          what it keeps on its disk
    budget.py         what it has spent of its privacy, over all runs, and refuses to spend
    saving.py         the model that it ends with
    telling.py        what it tells its operator
    policy.py         what its operator's policy says against a run, before and while it goes on
    allowance.py      how much of a run has left it, counted on its disk
    site_audit.py     what it writes into its audit log

The server:

    server.py         a run from its beginning, or from its last round, to its end
    begun.py          what it writes down of a run that it begins, to go on with it after a restart
    status.py         how the run stands, in files for those who look on
    engine.py         its rounds, as an engine for :class:`fedstrata.runs.driver.Driver`
    releases.py       the model of a round on its disk, before any site hears of it
    pooling.py        the mean and deviation of all sites' samples
    federation.py     the sites as the server sees them: asking, waiting, refusing
    rules.py          how long it waits, for how many, and what it refuses
    checks.py         replies as hostile input
    server_audit.py   what it writes into its audit log
    describing.py     what leaves a site and by which rules, in sentences

Beside them:

    secure/           secure aggregation: the server sees only the sum of the uploads
    flower/           all that knows Flower, which carries the messages
    audit.py          a log whose lines are chained by their hashes
    keys.py           private keys, and the folder of a consortium that holds them
    certificates.py   of an authority, a server and sites, and until when they hold
    sites_file.py     the file that names the sites, their public keys and the rules
    roll.py           who of a run's sites is still on that list
    live_keys.py      keys and certificates that change while a server runs
    inventory.py      what lies in a folder of keys
    local.py          a rehearsal: a server and its sites on one machine
    link.py           slow connections for a rehearsal
"""
