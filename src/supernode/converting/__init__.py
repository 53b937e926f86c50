"""How do checkpoints turn into other people's files and back, and how do two differ? Loads no torch."""

from __future__ import annotations
