"""What integrations have in common: calls that are requests, waits with a deadline, schedulers with an event loop."""
