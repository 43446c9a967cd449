"""The reference engine: serves a Hugging Face causal language model, in one process or one for each rank. It does not
use transformers' ``ContinuousBatchingManager``. That allocates its cache in its own thread, where no region applies,
and cannot stop between two steps. Its prompts have shapes that depend on other requests, so tokens would not repeat."""
