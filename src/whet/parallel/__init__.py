"""Parallelism over processes: device mesh, FSDP2, data parallelism, Ulysses and tensor parallelism."""
