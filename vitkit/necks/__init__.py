"""Between backbone and head: projections, pyramids."""
