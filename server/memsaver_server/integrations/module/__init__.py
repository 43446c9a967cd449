"""Any torch module as an engine."""
