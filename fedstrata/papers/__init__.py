"""The papers' tables and figures as recipes: what was published, the same run here, and what that says.

A recipe is data, a TOML file beside those of its paper, and published numbers are one CSV; no table has code of its
own. Reading them (``reading.py``), the runs that they stand for (``cells.py``), what of them can run here
(``availability.py``) and at which price (``pricing.py``), running (``running.py``), the number that is reported of a
run (``numbers.py``), what is kept of it (``keeping.py``), what it says against the published one (``judging.py``), and
columns that are made of others (``deriving.py``). All kept results together (``gathering.py``) become a document
(``writing.py``).
"""
