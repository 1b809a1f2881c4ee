"""One line for whatever is fastest: stock DDP, planned buckets, or planned units."""
