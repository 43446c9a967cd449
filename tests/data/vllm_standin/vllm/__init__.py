"""Stands in for vLLM where that cannot be installed: the interfaces that the plugin meets, and tensors for a model.

What the names are and what calls what is as in vLLM 0.26. The memory is real: torch tensors, on the host driver.
"""
