"""One step in virtual time: what it consists of, what carries its messages, and what happens when."""
