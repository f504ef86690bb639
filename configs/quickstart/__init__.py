"""Small runs on the synthetic world: minutes on a CPU, no download."""
