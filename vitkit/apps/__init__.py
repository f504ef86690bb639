"""Applications of models: training, prediction, evaluation, reports, export. The core never imports them."""
