"""Who holds the ranks' newest state while ranks come and go? One keeper a node. Loads no torch."""

from __future__ import annotations
