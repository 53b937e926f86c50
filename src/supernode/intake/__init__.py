"""What people write becomes values: job files, overrides, a model's name; and values become job files again."""
