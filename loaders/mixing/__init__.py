"""Several datasets read as one, in shares.

mixture  what is declared: datasets, weights, when a pass ends
order    which dataset each sample comes from: a pure function of weights and seed
session  the connections of all of them, as one
"""

from __future__ import annotations

from forebay.loaders.mixing.mixture import Mixture

__all__ = ["Mixture"]
