"""The reference engine: serves a Hugging Face causal language model, in one process or one for each rank. transformers'
``ContinuousBatchingManager`` is not used: it allocates its cache in its own thread, where no region applies, cannot
stop between two steps, and computes a prompt in shapes that depend on other requests, so tokens would not repeat."""
