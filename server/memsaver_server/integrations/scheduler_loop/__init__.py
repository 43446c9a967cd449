"""Engines whose scheduler is a loop in processes of its own: what SGLang's and tokenspeed's integrations share."""
