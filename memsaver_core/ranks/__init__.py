"""An engine of several processes (its ranks): the messages that the service exchanges with them, and their progress."""
