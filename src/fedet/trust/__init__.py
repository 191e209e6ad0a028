"""Against hostile clients: averages that they can't decide, and simulated attacks to measure it."""
