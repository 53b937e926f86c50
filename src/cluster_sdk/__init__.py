"""The alias under which the original description imports the product: `from cluster_sdk import SuperNode`."""

from supernode.control.supernode import SuperNode

__all__ = ["SuperNode"]
