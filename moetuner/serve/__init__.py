"""Running the engine: what its caches do, and what they are told."""
