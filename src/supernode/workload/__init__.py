"""What a step has to do: a model as counts of sublayers, the ways to spread them, and what each asks of a card."""
