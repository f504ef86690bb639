"""What a model costs: parameters, MACs and memory."""
