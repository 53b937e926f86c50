"""When do gradients meet? From inside backward, by bucket or by shard, whole or compressed.

`buckets` and `shards` send by the `ways`, `compressed` puts a compressor between hosts, `hooks` lends it to plain
PyTorch. May import torch, `ways`, `compressing`, `axes`, `schema` and the ground floor.
"""
