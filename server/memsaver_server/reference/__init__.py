"""The reference engine: any Hugging Face causal language model, served in one process."""
