"""How cards are joined and how long bytes take between them.

`topology` answers who is next to whom on a machine. `level` holds the closed forms of symmetric fabrics, `choice` the
algorithms by size; both need numpy only and cost the same for eight cards and a million. `network` holds links as
arrays, with stragglers and failures; `shapes` builds them; `routes` and `adaptive` find ways; `flows` shares links and
costs schedules message by message; `bounds` says what is possible at all. May import schema, hardware, collectives,
numpy, scipy, and the ground floor.
"""
