"""Adapters to llama.cpp processes: find it by symbol, attach, decode what the probe saw."""
