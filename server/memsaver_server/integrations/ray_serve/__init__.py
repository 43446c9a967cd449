"""Ray Serve LLM: sleep and wake-up of all replicas of a model through a fleet's coordinator."""
