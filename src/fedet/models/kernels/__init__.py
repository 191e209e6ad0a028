"""Convolutions that cost less than torch's where layers are narrow, maps are small, or both are large."""
