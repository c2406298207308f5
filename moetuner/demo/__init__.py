"""The demonstration: a simulated board, a small MoE model and a real llama-server."""
