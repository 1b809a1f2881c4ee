"""Sharded plans on torch's own `fully_shard` (FSDP2)."""
