"""Operations: the table of their states, one operation, those that are remembered, and the queue of an engine."""
