"""The nouns that every room shares, one module each: frozen, checked at birth, plain enough for YAML, JSON and REST.

May import `errors`, `units` and `registry`; the standard library otherwise, and pydantic in `codec` alone.
"""
