"""How long it takes and what it holds: seconds, bytes and errors, for arrays of strategies at once."""
