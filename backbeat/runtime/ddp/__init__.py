"""What users hold: `DistributedDataParallel` on backbeat's reducer or on torch's own, its settings and its tuner."""
