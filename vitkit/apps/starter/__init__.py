"""From your own data to an evaluated model: split it, choose settings by timing, train, report."""
