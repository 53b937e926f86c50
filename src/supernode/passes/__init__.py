"""What does a rank do with its part? Passes through stages and their pace, sums of what is shared, names as a whole."""
