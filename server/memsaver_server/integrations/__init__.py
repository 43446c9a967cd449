"""Engines that are not ours, one folder for each."""
