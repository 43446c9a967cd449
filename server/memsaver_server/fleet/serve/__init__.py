"""Serves a fleet as one engine serves itself: the same paths and dialects, for all engines together."""
