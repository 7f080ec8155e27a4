"""The papers' figures, redrawn from our runs: what recipes ask for, the rows behind it, and the charts.

What a recipe asks for under ``[charts]`` is data (``asked.py``), and so no figure has code of its own: a few kinds of
charts (``kinds.py``) find their numbers in the runs of each row and column (``material.py``) and are drawn as panels
(``marks.py``). Tables have a picture of the published numbers against ours, and of the claims (``glance.py``).
``section.py`` puts all of it on the page.
"""
