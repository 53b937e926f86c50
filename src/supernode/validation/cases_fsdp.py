"""How do the FSDP and recent Megatron tables read as models, strategies and machines?"""

from __future__ import annotations

FSDP_READERS = {}
