"""Loading datasets as batches: settings, samplers, worker processes, collation."""
