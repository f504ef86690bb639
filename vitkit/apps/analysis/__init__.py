"""Count what a model costs: parameters, MACs and memory."""
