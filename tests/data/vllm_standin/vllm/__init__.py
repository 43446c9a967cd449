"""Stands in for vLLM: the interfaces that the plugin uses, and tensors for a model.

Names and calls are those of vLLM 0.26. The memory is real: torch tensors, on the host driver.
"""
