"""HTTP: who may call, how requests are read, how results and errors become responses, and limits on callers."""
