"""Models of any kind and size as files: read in blocks, summed tensor by tensor, and written shard by shard."""
