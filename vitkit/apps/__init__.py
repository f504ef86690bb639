"""The second storey: what people do with a model. The core never imports it."""
