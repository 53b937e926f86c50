"""What the model reads: text and token files made ready, dealt out to steps, and the baseline to beat; loads no torch.

May import schema, numpy, xxhash; tokenizers where a byte-pair encoding is asked for; and the ground floor.
"""
