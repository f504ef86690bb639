"""Small models for a few hundred images of your own, which `vitkit start` sizes and trains."""
