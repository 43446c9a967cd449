"""What is asked of memsaver and what it answers, declared once. Needs neither torch nor a web framework."""
