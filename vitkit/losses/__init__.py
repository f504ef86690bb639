"""Loss functions and the criteria that combine them."""
