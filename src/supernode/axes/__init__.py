"""What does an axis send inside a step? Autograd functions over one group."""
