"""moetuner: run Mixture-of-Experts models larger than memory fast on Jetson boards."""

__version__ = "0.1.0"
