"""Parts that vitkit does not have, as a user writes them: a Python file for the classes, and configs that import it."""
