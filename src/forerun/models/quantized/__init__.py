"""Hugging Face folders whose weights are quantised: how config.json says so, and what their tensors hold."""
