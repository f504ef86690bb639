"""What the models that vitkit finds by name cost: `vitkit.analyze`, and tables of all backbones."""
