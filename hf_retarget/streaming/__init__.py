"""Streamed ports of models of any kind and size: read in blocks, summed by tensor, and written shard by shard."""
