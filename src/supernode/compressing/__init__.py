"""What is sent instead of a gradient? Compressors with error feedback."""
