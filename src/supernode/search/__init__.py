"""Which way is best: every strategy a machine bears, the front of the good ones, and where on the fabric they lie."""
