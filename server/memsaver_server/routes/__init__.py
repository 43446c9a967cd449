"""The HTTP endpoints: one module per dialect and per concern, without state of their own."""
