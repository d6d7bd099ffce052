"""The inference engine: scheduling, KV memory, attention, sampling, and the loop around them."""
