"""Costs of the models that vitkit finds by name: `vitkit.analyze`, and tables of all backbones."""
