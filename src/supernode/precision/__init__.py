"""What holds a number? Casts, scales, rounding and the optimizer's state in few bits. May import torch and `schema`."""
