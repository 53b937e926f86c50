"""Which way does a tensor take to be summed over ranks? Which share a host, and what is sent between hosts.

`meeting` is the one call that sums a tensor over a group; `choose` picks the way behind it, by what is predicted and
what `trial` measures. `hierarchy` goes through a host's memory (`shared`) and between `hosts`, in chunks (`cut`);
`execute` carries any description of `collectives` out, message by message, and `describe` names them. May import torch,
`collectives`, `schema` and the ground floor.
"""
