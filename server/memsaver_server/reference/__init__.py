"""The reference engine: serves a Hugging Face causal language model, in one process or one for each rank.

It is a plain loop and does not use transformers' ``ContinuousBatchingManager``: that allocates its cache in its own
thread and captures graphs into its own pool, where no region applies, cannot stop between two steps to freeze requests,
and computes a prompt in shapes that depend on the other requests, so that tokens would not repeat bit by bit.
"""
