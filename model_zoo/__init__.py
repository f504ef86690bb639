"""Published models: index, converters from official checkpoints."""
