"""What is about HTTP: the application, who may call it, and what a failure becomes."""
