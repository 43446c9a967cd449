"""The HTTP surface: one file per dialect and per concern. None of them holds state."""
