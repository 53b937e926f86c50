"""What is sent instead of a gradient? Compressors with error feedback.

May use torch, `schema` and what lies below it; knows neither hosts nor training.
"""
