"""Sets of configs that are each trained with several seeds, with their table and plot."""
