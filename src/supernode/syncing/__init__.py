"""How do gradients meet? Which ranks share a host, what is sent between them, and when.

`meeting` is the one call that sums a tensor over a group; `choose` picks the way behind it, by what is predicted and
what `trial` measures. `hierarchy` goes through a host's memory (`shared`) and between `hosts`, in chunks (`cut`);
`execute` carries any description of `collectives` out, message by message. `buckets` and `shards` call `meeting` from
inside backward, `compressed` puts a compressor between hosts, `hooks` lends it to plain PyTorch. May import torch,
`collectives`, `compressing`, `axes`, `schema` and the ground floor.
"""
