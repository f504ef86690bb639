"""Small models for a few hundred own pictures, which `vitkit start` sizes and trains."""
