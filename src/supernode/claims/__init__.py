"""What is claimed for the product, and what it shows: each figure computed on the spot, never written down."""
