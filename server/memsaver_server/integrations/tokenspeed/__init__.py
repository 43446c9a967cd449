"""tokenspeed: memsaver in the process of its scheduler."""
