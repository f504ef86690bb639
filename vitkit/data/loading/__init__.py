"""From datasets to batches: samplers, worker processes, shared memory, collation."""
