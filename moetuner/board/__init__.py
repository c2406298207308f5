"""Adapters to the board: sysfs, devfreq, the saved baseline, hotplug, telemetry."""
