"""The reference engine: serves a Hugging Face causal language model, in one process or one for each rank."""
