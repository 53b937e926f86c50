"""How do gradients meet? Which ranks share a host, what is sent between them, and when."""
