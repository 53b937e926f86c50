"""Weights from other trainers, and ours for them: safetensors as Hugging Face lays them, and PyTorch's own checkpoints.

May import converting, storing, schema and the ground floor; torch, checkpoint, parallel and passes in `begin`, `source`
and `export` alone.
"""
