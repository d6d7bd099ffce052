"""perflab: a performance laboratory for LLM inference."""
