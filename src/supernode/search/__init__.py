"""Which way is best: every strategy a machine bears, the front of the good ones, and why each is as it is."""
