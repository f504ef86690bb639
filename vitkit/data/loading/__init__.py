"""From datasets to batches: settings, samplers, worker processes, collation."""
