"""Models that share GPUs take turns: a request wakes the engine of its model, and others make room for it."""
